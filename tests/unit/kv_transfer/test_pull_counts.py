"""What a small pull costs besides its bytes, as counts: it takes as long as its Python does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator
from types import FrameType

import pytest

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.transports.catalog import KINDS
from pdserve.clock import ManualClock
from tests.fake_transport import FakeNetwork
from tests.unit.kv_transfer.pairs import SMALL, Pair, make_pool, make_puller


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """As nodes are by default: over shared memory, without checksums."""
    source, destination = make_pool(SMALL, 32, seed=1), make_pool(SMALL, 32)
    identity, clock = KvIdentity("a-model", "main", SMALL), ManualClock(100.0)
    kinds = [kind for kind in KINDS if kind.name == "shm"]
    exporter = Exporter("p0", "life-1", identity, source, clock, kinds)
    puller = make_puller(destination, SMALL)
    await exporter.start("127.0.0.1")
    link = await puller.connect(exporter.welcome(), timeout_s=5)
    yield Pair(exporter, puller, link, source, destination, clock, FakeNetwork())
    await link.close()
    await puller.close()
    await exporter.close()
    source.close()
    destination.close()


async def calls_of_a_pull(pair: Pair, num_blocks: int) -> Counter[str]:
    """How many functions of Python, and native ones, a pull of scattered whole blocks calls."""
    blocks = [2 * i for i in range(num_blocks)]
    ticket = pair.exporter.issue("r", 0, num_blocks * SMALL.block_size, blocks)
    counts: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, _function: object) -> None:
        counts[event] += event.endswith("call")

    await pair.pull(ticket, blocks)
    sys.setprofile(count)
    try:
        await pair.pull(ticket, blocks)
    finally:
        sys.setprofile(None)
    return counts


async def test_a_small_pull_makes_few_calls_whatever_its_blocks(pair: Pair) -> None:
    one, many = await calls_of_a_pull(pair, 1), await calls_of_a_pull(pair, 15)
    assert one["call"] <= 80
    assert one["c_call"] <= 40
    assert many == one
