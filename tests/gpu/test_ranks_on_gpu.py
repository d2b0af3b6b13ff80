"""Ranks by NCCL: what one GPU can show of it, and two of them. Skipped where there is none."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from torch.distributed import HashStore

from kv_transfer.cuda.catalog import missing
from pdserve.engine.cuda.capture.recorder import CudaRecorder
from pdserve.engine.ranks.process_group import GroupCollectives, _group, _Groups
from pdserve.engine.ranks.shard import WHOLE
from pdserve.node.device_ranks.start import start_device_ranks
from pdserve.node.memory.kv_memory import engine_buffer, make_kv_memory
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import load_runner
from pdserve.protocol import NodeRole
from tests.checkpoints import make_checkpoint
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.node.device_ranked import model_of

CUDA = torch.device("cuda", 0)


def test_a_graph_has_nccl_in_it() -> None:
    """With one rank a sum is what it was, but it is NCCL's, and captured."""
    store = HashStore()
    ranks = GroupCollectives(_Groups(_group(store, 0, 1, CUDA), None), WHOLE, CUDA, store)
    source, out = torch.ones(64, device=CUDA), torch.zeros(64, device=CUDA)

    def work() -> None:
        (gathered,) = ranks.gather(ranks.all_reduce(source * 2.0))
        out.copy_(gathered)

    try:
        recording = CudaRecorder(CUDA).record(work)
        source.fill_(5.0)
        recording.replay()
        torch.cuda.synchronize(CUDA)
        assert (out == 10.0).all()
        assert ranks.largest(7) == 7
    finally:
        ranks.close()


@pytest.mark.skipif(
    torch.cuda.device_count() < 2 or missing() is not None, reason="needs two GPUs, and cupy"
)
@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 1), (1, 2)])
def test_tokens_of_two_gpus_are_those_of_one(
    tmp_path: Path, num_ranks: int, num_stages: int
) -> None:
    """The prompts are one step of 518 rows, which stages compute in parts."""
    path = make_checkpoint(tmp_path / "qwen3", "qwen3")
    expected, found = (
        [make_request(make_prompt(n, seed=n), request_id=str(n)) for n in (1, 17, 60, 440)]
        for _ in range(2)
    )
    Node.load(path, DecoderKind.TORCH).generate(expected, 10)
    model = replace(model_of(path, num_ranks, num_stages=num_stages), device=CUDA)
    memory = make_kv_memory(NodeRole.PREFILL, model)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    ranks = start_device_ranks(model, CorePlan(2, cores, cores), memory)
    try:
        ranks.wait_mapped()
        runner = load_runner(model, engine_buffer(memory), lambda _: None, None, ranks)
        free = list(range(model.num_blocks))
        Node(runner._model, runner.kv_cache, runner, free).generate(found, 10)
    finally:
        ranks.close()
        memory.close()
    assert [r.output_token_ids for r in found] == [r.output_token_ids for r in expected]
