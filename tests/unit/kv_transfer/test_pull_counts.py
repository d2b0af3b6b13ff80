"""What a small pull costs besides its bytes, as counts: it takes as long as its Python does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator
from types import FrameType

import pytest

from tests.unit.kv_transfer.pairs import SMALL, Pair, open_pair

PULLS = 10


@pytest.fixture(params=["shm", "tcp"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """As nodes are by default, with checksums; of tcp both ends are in this process."""
    async with open_pair(request.param) as opened:
        yield opened


async def calls_of_a_pull(pair: Pair, num_blocks: int) -> Counter[str]:
    """How many functions of Python, and native ones, a pull of scattered whole blocks calls.

    The fewest of some pulls: on a busy machine, one waits for its bytes more often.
    """
    blocks = [2 * i for i in range(num_blocks)]
    ticket = pair.exporter.issue("r", 0, num_blocks * SMALL.block_size, blocks)
    found: list[Counter[str]] = []

    def count(_frame: FrameType, event: str, _function: object) -> None:
        found[-1][event] += event.endswith("call")

    await pair.pull(ticket, blocks)
    for _ in range(PULLS):
        found.append(Counter())
        sys.setprofile(count)
        try:
            await pair.pull(ticket, blocks)
        finally:
            sys.setprofile(None)
    return min(found, key=Counter.total)


async def test_a_small_pull_makes_few_calls_whatever_its_blocks(pair: Pair) -> None:
    one, many = await calls_of_a_pull(pair, 1), await calls_of_a_pull(pair, 15)
    most = {"shm": 70, "tcp": 320}[pair.link.transport]
    assert one["call"] + one["c_call"] <= most
    assert many == one
