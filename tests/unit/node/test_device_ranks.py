"""Nodes whose ranks have a device and KV each: processes, steps, deaths, and KV between nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from pdserve.engine.request import Scheduled
from pdserve.engine.steps.worst import num_parts
from pdserve.node.device_ranks.following import with_slots
from pdserve.node.engine_watch import unless_rank_lost
from pdserve.node.start.model import check_devices, device_of_rank
from pdserve.shared.errors import AdapterRefused, ConfigError, NodeSick
from tests.checkpoints import make_checkpoint
from tests.matrix import matrix
from tests.plain_batch import build_batch
from tests.requests import make_request
from tests.unit.engine_adapters.test_ranked import VOCAB, adapters_of, said
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.node.device_pairs import (
    NUM_OUTPUT,
    prefilled_and_decoded,
    requests_of,
    tokens_of_one_rank,
)
from tests.unit.node.device_ranked import device_ranked

LENGTHS = (1, 15, 16, 17, 60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranked") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return tokens_of_one_rank(checkpoint, LENGTHS)


@pytest.mark.parametrize(
    "divided", matrix([(one,) for one in [(2, 1), (4, 1), (2, 2)]], {((2, 2),)}), ids=str
)
def test_tokens_are_those_of_one_rank(
    checkpoint: Path, expected: list[list[int]], divided: tuple[int, int]
) -> None:
    num_ranks, num_stages = divided
    requests = requests_of(LENGTHS)
    with device_ranked(checkpoint, num_ranks, num_stages=num_stages) as ranked:
        ranked.node.generate(requests, NUM_OUTPUT, chunk=23)
    assert [request.output_token_ids for request in requests] == expected


@pytest.mark.long
@pytest.mark.parametrize("divided", [(2, 1), (2, 2)], ids=str)
def test_ranks_have_their_shares_of_adapters(divided: tuple[int, int], tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", vocab_size=VOCAB)
    adapters = adapters_of(tmp_path, base, "llama")
    alone = Node.load(base, DecoderKind.TORCH)
    for adapter in adapters:
        alone.model.take_adapter(adapter)
    expected = said(alone, adapters)
    num_ranks, num_stages = divided
    with device_ranked(base, num_ranks, num_stages=num_stages) as ranked:
        model = ranked.node.model
        for adapter in adapters:
            model.take_adapter(adapter)
        assert said(ranked.node, adapters) == expected
        model.drop_adapter(adapters[0].digest)
        assert said(ranked.node, adapters[1:]) == [expected[0], *expected[2:]]
        assert ranked.ranks is not None
        os.kill(ranked.ranks.processes.pids[0], signal.SIGKILL)
        with pytest.raises(AdapterRefused, match="a rank has not taken"):
            model.take_adapter(adapters[0])


@pytest.mark.long
def test_stages_compute_a_large_step_in_parts(checkpoint: Path, expected: list[list[int]]) -> None:
    requests = requests_of(LENGTHS * 5)
    num_rows = sum(len(request.prompt_token_ids) for request in requests)
    assert num_parts(num_rows, 2) == 2
    with device_ranked(checkpoint, 1, num_stages=2) as ranked:
        ranked.node.generate(requests, NUM_OUTPUT)
    assert [request.output_token_ids for request in requests] == expected * 5


@pytest.mark.parametrize(
    "divided", matrix([(one,) for one in [(4, 1), (2, 2), (1, 2)]], {((2, 2),)}), ids=str
)
@pytest.mark.parametrize("is_computing", matrix([True, False], 1), ids=["in steps", "idle"])
def test_a_killed_rank_ends_the_steps_of_the_others(
    checkpoint: Path, is_computing: bool, divided: tuple[int, int]
) -> None:
    num_ranks, num_stages = divided
    with device_ranked(checkpoint, num_ranks, num_stages=num_stages) as ranked:
        node, ranks = ranked.node, ranked.ranks.processes
        node.logits(make_prompt(9))
        if not is_computing:
            os.kill(ranks.pids[-1], signal.SIGKILL)
            ranks._watcher.join(30.0)  # it ends with the last one of them
            assert not ranks._watcher.is_alive()
        else:
            os.kill(ranks.pids[-1], signal.SIGSTOP)  # so that the step cannot end before it
            threading.Timer(0.05, os.kill, (ranks.pids[-1], signal.SIGKILL)).start()
        started_s = time.monotonic()
        with pytest.raises(NodeSick, match="rank_lost"):
            node.logits(make_prompt(9))
        assert time.monotonic() - started_s < 30.0, "there was no sign of it but its silence"
        ranks._watcher.join(30.0)
        assert f"(process {ranks.pids[-1]}) was killed by signal 9" in ranks.lost
    for pid in ranks.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_rank_that_ends_while_others_load_ends_the_node() -> None:
    """Whatever rank 0 waits for: on a GPU, it may be for the rank that has ended."""
    lost = [""]

    async def end_sick(sick: NodeSick) -> NoReturn:
        raise sick

    never = asyncio.Event()
    loading = asyncio.ensure_future(unless_rank_lost(never.wait(), lambda: lost[0], end_sick))
    await asyncio.sleep(0)
    lost[0] = "rank 1 of 2 was killed"
    with pytest.raises(NodeSick, match="rank_lost: rank 1 of 2 was killed"):
        await loading
    never.set()


@pytest.mark.parametrize(("kind", "sizes"), matrix([("tcp", (16, 8)), ("shm", (16, 16))], 1))
@pytest.mark.parametrize(
    ("from_node", "to_node"),  # ranks, and stages
    matrix(
        [((2, 1), (4, 1)), ((4, 1), (1, 2)), ((1, 1), (2, 2)), ((2, 2), (2, 1)), ((1, 2), (1, 1))],
        {((4, 1), (1, 2)), ((2, 2), (2, 1))},
    ),
    ids=str,
)
def test_a_request_goes_on_at_a_node_of_other_ranks(
    checkpoint: Path,
    expected: list[list[int]],
    from_node: tuple[int, int],
    to_node: tuple[int, int],
    kind: str,
    sizes: tuple[int, int],
) -> None:
    with (
        device_ranked(checkpoint, from_node[0], sizes[0], from_node[1]) as source,
        device_ranked(checkpoint, to_node[0], sizes[1], to_node[1]) as destination,
    ):
        assert prefilled_and_decoded(source, destination, LENGTHS[-1], kind) == expected[-1]


def test_slots_follow_from_what_the_step_memory_has() -> None:
    """Those of chunks in the middle of their prompts, and of decodes."""
    requests = [make_request(make_prompt(length)) for length in (40, 5, 33)]
    for number, (request, computed) in enumerate(zip(requests, (16, 0, 32), strict=True)):
        request.block_table = [10 * number + block for block in (3, 0, 7)]
        request.num_computed_tokens = computed
    rows = [Scheduled(request, count) for request, count in zip(requests, (20, 5, 1), strict=True)]
    batch = build_batch(rows, 16, torch.device("cpu"))
    nothing = torch.empty(0, dtype=torch.int64)
    bare = replace(batch, attention=replace(batch.attention, slot_mapping=nothing))
    found = with_slots(bare, 16)
    assert torch.equal(found.attention.slot_mapping, batch.attention.slot_mapping)


def test_ranks_have_gpus_in_a_row() -> None:
    cuda, second = torch.device("cuda"), torch.device("cuda:2")
    assert [str(device_of_rank(cuda, rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [str(device_of_rank(second, rank)) for rank in range(2)] == ["cuda:2", "cuda:3"]
    check_devices(second, 2, 4)
    with pytest.raises(ConfigError, match="3 ranks take cuda:2 to cuda:4, and there are 4 GPUs"):
        check_devices(second, 3, 4)
