"""Nodes whose ranks have a device and KV each: processes, steps, deaths, and KV between nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.puller import Puller
from kv_transfer.transports.catalog import choose_kinds
from pdserve.clock import ManualClock
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.steps.parts import num_parts
from pdserve.errors import ConfigError, NodeSick
from pdserve.node.device_ranks.following import with_places
from pdserve.node.engine_watch import unless_rank_lost
from pdserve.node.start.model import check_devices, device_of_rank
from tests.checkpoints import make_checkpoint
from tests.plain_batch import build_batch
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, make_prompt
from tests.unit.engine_model.harness import Node as Alone
from tests.unit.node.device_ranked import DeviceRanked, device_ranked

LENGTHS = (1, 15, 16, 17, 60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranked") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """Ten tokens for each length, of one rank."""
    requests = [make_request(make_prompt(length, seed=length)) for length in LENGTHS]
    Alone.load(checkpoint, DecoderKind.TORCH).generate(requests, 10)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("divided", [(2, 1), (4, 1), (2, 2)], ids=str)
def test_tokens_are_those_of_one_rank(
    checkpoint: Path, expected: list[list[int]], divided: tuple[int, int]
) -> None:
    num_ranks, num_stages = divided
    requests = [make_request(make_prompt(length, seed=length)) for length in LENGTHS]
    with device_ranked(checkpoint, num_ranks, num_stages=num_stages) as ranked:
        ranked.node.generate(requests, 10, chunk=23)
    assert [request.output_token_ids for request in requests] == expected


def test_stages_compute_a_large_step_in_parts(checkpoint: Path, expected: list[list[int]]) -> None:
    requests = [make_request(make_prompt(length, seed=length)) for length in LENGTHS * 5]
    num_rows = sum(len(request.prompt_token_ids) for request in requests)
    assert num_parts(num_rows, 2) == 2
    with device_ranked(checkpoint, 1, num_stages=2) as ranked:
        ranked.node.generate(requests, 10)
    assert [request.output_token_ids for request in requests] == expected * 5


@pytest.mark.parametrize("divided", [(4, 1), (2, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("is_computing", [False, True], ids=["idle", "in steps"])
def test_a_killed_rank_ends_the_steps_of_the_others(
    checkpoint: Path, is_computing: bool, divided: tuple[int, int]
) -> None:
    num_ranks, num_stages = divided
    with device_ranked(checkpoint, num_ranks, num_stages=num_stages) as ranked:
        node, ranks = ranked.node, ranked.ranks.processes
        node.logits(make_prompt(9))
        if not is_computing:
            os.kill(ranks.pids[-1], signal.SIGKILL)
            ranks._watcher.join(5.0)  # it ends with the last one of them
            assert not ranks._watcher.is_alive()
        else:
            os.kill(ranks.pids[-1], signal.SIGSTOP)  # so that the step cannot end before it
            threading.Timer(0.05, os.kill, (ranks.pids[-1], signal.SIGKILL)).start()
        started_s = time.monotonic()
        with pytest.raises(NodeSick, match="rank_lost"):
            node.logits(make_prompt(9))
        assert time.monotonic() - started_s < 5.0, "there was no sign of it but its silence"
        ranks._watcher.join(5.0)
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


@pytest.mark.parametrize(("kind", "sizes"), [("shm", (16, 16)), ("tcp", (16, 8))])
@pytest.mark.parametrize(
    ("from_node", "to_node"),  # ranks, and stages
    [((2, 1), (4, 1)), ((4, 1), (1, 2)), ((1, 1), (2, 2)), ((2, 2), (2, 1)), ((1, 2), (1, 1))],
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
    """Prefilled here and decoded there, as in a handoff, a migration, or a prefix pull."""
    number = len(LENGTHS) - 1
    prompt = make_prompt(LENGTHS[number], seed=LENGTHS[number])
    with (
        device_ranked(checkpoint, from_node[0], sizes[0], from_node[1]) as source,
        device_ranked(checkpoint, to_node[0], sizes[1], to_node[1]) as destination,
    ):
        first, then = make_request(prompt), make_request(prompt)
        source.node.step([Scheduled(first, len(prompt))])
        num_blocks = destination.model.layout.blocks_for(len(prompt))
        then.block_table = [destination.node.free.pop() for _ in range(num_blocks)]
        asyncio.run(move(source, destination, kind, first, then))
        then.output_token_ids += first.output_token_ids
        then.num_computed_tokens = len(prompt)
        destination.node.generate([then], 10)
    assert then.output_token_ids == expected[number]


async def move(
    source: DeviceRanked, destination: DeviceRanked, kind: str, first: Request, then: Request
) -> None:
    """Pull the prompt's KV."""
    identities = [
        KvIdentity("a-model", "main", each.model.layout, each.model.share.parallelism.pipeline)
        for each in (source, destination)
    ]
    kinds = choose_kinds([kind], source.memory)
    clock = ManualClock(100.0)
    exporter = Exporter("p0", "life-1", identities[0], source.memory, clock, kinds)
    puller = Puller(destination.memory, identities[1], host_id(), kinds)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(exporter.close)
        stack.push_async_callback(puller.close)
        await exporter.start("127.0.0.1")
        link = await puller.connect(exporter.welcome(), 5.0)
        stack.push_async_callback(link.close)
        num_tokens = len(first.prompt_token_ids)
        ticket = exporter.issue("r", 0, num_tokens, first.block_table)
        await puller.pull(link, ticket, then.block_table, 0, 5.0)


def test_positions_and_slots_follow_from_what_the_step_memory_has() -> None:
    """Those of chunks in the middle of their prompts, and of decodes."""
    requests = [make_request(make_prompt(length)) for length in (40, 5, 33)]
    for number, (request, computed) in enumerate(zip(requests, (16, 0, 32), strict=True)):
        request.block_table = [10 * number + block for block in (3, 0, 7)]
        request.num_computed_tokens = computed
    rows = [Scheduled(request, count) for request, count in zip(requests, (20, 5, 1), strict=True)]
    batch = build_batch(rows, 16, torch.device("cpu"))
    nothing = torch.empty(0, dtype=torch.int64)
    bare = replace(
        batch, positions=nothing, attention=replace(batch.attention, slot_mapping=nothing)
    )
    found = with_places(bare, 16)
    assert torch.equal(found.positions, batch.positions)
    assert torch.equal(found.attention.slot_mapping, batch.attention.slot_mapping)


def test_ranks_have_gpus_in_a_row() -> None:
    cuda, second = torch.device("cuda"), torch.device("cuda:2")
    assert [str(device_of_rank(cuda, rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [str(device_of_rank(second, rank)) for rank in range(2)] == ["cuda:2", "cuda:3"]
    check_devices(second, 2, 4)
    with pytest.raises(ConfigError, match="3 ranks take cuda:2 to cuda:4, and there are 4 GPUs"):
        check_devices(second, 3, 4)
