"""What a step costs on a GPU in launches, as exact counts: kernels of ours, and torch's operations.

Views and new tensors are launches of nothing, and are not counted. A count that has gone up says
what has come into the step; one that has gone down is to be written down here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triton.runtime.interpreter import GridExecutor

from pdserve.engine.models.config import load_model_config
from pdserve.engine.request import Scheduled
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.checkpoints import make_checkpoint
from tests.requests import make_request
from tests.unit.engine_cuda.decoders import make_node, random_weights
from tests.unit.engine_cuda.late_copies import PromptCopies
from tests.unit.engine_cuda.replayed import Recorded
from tests.unit.engine_model.harness import Node, make_prompt

pytestmark = pytest.mark.usefixtures("interpreted")
NO_LAUNCH = {
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.detach.default",
    "aten.lift_fresh.default",
}


class Launches(TorchDispatchMode):
    """Counts what would be launched: operations that are no view, and our kernels by their names.

    What the interpreter itself asks of torch is not counted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._is_interpreting = False
        run = GridExecutor.__call__

        def counted(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.counts[executor.fn.__name__] += 1
            self._is_interpreting = True
            run(executor, *args, **kwargs)
            self._is_interpreting = False

        monkeypatch.setattr(GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self._is_interpreting or func.is_view or str(func) in NO_LAUNCH):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def cuda_node(path: Path, num_layers: int, family: str, *, has_graphs: bool) -> Node:
    from pdserve.engine.cuda.decoder import CudaDecoder
    from pdserve.engine.cuda.staging import Staging
    from pdserve.engine.cuda.triton_attention import TritonAttention

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    checkpoint = make_checkpoint(path, family, num_hidden_layers=num_layers, **sizes)
    config = load_model_config(resolve_checkpoint(str(checkpoint)))
    weights = random_weights(config, torch.float32, torch.device("cpu"))
    recorder = Recorded() if has_graphs else None
    staging = Staging(PromptCopies())
    return make_node(CudaDecoder(config, weights, TritonAttention(), staging, recorder, (1, 4)))


def launches_of_a_layer(
    tmp_path: Path,
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_graphs: bool,
    family: str = "qwen3",
) -> Counter[str]:
    """Of one request's step: what a model of two layers launches, less what one of one does."""
    totals = []
    for num_layers in (1, 2):
        node = cuda_node(tmp_path / str(num_layers), num_layers, family, has_graphs=has_graphs)
        request = make_request(make_prompt(6))
        node.step([Scheduled(request, 6)])  # captures graphs, if there are any
        if num_tokens > 1:
            request = make_request(make_prompt(num_tokens))
        with monkeypatch.context() as patch, Launches(patch) as launches:
            node.step([Scheduled(request, num_tokens)])
        totals.append(launches.counts)
    assert not totals[0] - totals[1], "another layer saves nothing"
    return totals[1] - totals[0]


LAYER = {
    "add_rms_norm_rows": 2,
    "aten.linear.default": 4,  # qkv, attention's output, gate and up, down
    "rotate_and_write_heads": 1,
    "attend_single_rows": 1,
    "merge_splits": 1,
    "silu_mul_rows": 1,
}
EXPERTS = {  # what another layer has if it has experts
    "aten.linear.default": 3,  # qkv, attention's output, router
    "aten.sort.stable": 2,  # of experts by score, of rows by expert
    "aten.logsumexp.default": 1,
    "aten.sub.Tensor": 1,
    "aten.exp.default": 1,
    "aten.arange.default": 1,
    "aten.scatter_.src": 1,
    "aten.searchsorted.Tensor": 1,
    "multiply_experts": 2,
    "add_up_experts": 1,
}


def test_a_layer_of_a_decode_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph: these are its nodes."""
    assert launches_of_a_layer(tmp_path, 1, monkeypatch, has_graphs=True) == LAYER


def test_a_layer_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches_of_a_layer(tmp_path, 1, monkeypatch, has_graphs=True, family="qwen3_moe")
    assert found == {**LAYER, **EXPERTS}


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_layer_of_a_step_without_a_graph(
    tmp_path: Path, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = launches_of_a_layer(tmp_path, num_tokens, monkeypatch, has_graphs=False)
    assert found == {**LAYER, "attend_chunks": 1}
