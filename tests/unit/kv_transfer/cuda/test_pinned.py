"""The host tier of a pool on GPUs: what the side streams do, and what is left when they fail."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kv_transfer.cuda.driver import DeviceError
from kv_transfer.cuda.pinned import PinnedCopies, PinnedHostBlocks
from kv_transfer.tier import HostTier
from tests.fakes.gpus import FakeHost
from tests.unit.kv_transfer.gpu_pairs import DeviceBlocks, assert_still, until
from tests.unit.kv_transfer.pairs import SMALL

NUM_BLOCKS, NUM_SLOTS = 16, 4
HASHES = [bytes([i]) * 16 for i in range(NUM_SLOTS)]


class Bench:
    """A tier in pinned memory, beside a pool with a part on each of two GPUs."""

    def __init__(self) -> None:
        self.host = FakeHost()
        layouts = [SMALL.shard(number, 2) for number in range(2)]
        self.parts = [
            DeviceBlocks(self.host.driver(number), layout, NUM_BLOCKS, self.host)
            for number, layout in enumerate(layouts)
        ]
        for number, part in enumerate(self.parts):
            part.fill(number)
        sizes = [layout.block_bytes for layout in layouts]
        blocks = PinnedHostBlocks(NUM_SLOTS, sizes, self.host.driver())
        copies = [PinnedCopies(part.pool, blocks, n) for n, part in enumerate(self.parts)]
        self.tier = HostTier(NUM_SLOTS, copies)
        self.slots = [self.host.pinned[region.address] for region in blocks.regions]

    async def hang(self, verb: str) -> asyncio.Task[None]:
        """Begin to store or load blocks 0 and 2; each part's copy hangs after its first block."""
        before = [slots.copy() for slots in self.slots]
        pool = [part.data.copy() for part in self.parts]
        self.host.let(copies=False)
        copying = asyncio.create_task(getattr(self.tier, verb)(HASHES[:2], [0, 2]))
        changed = self.slots if verb == "store" else [part.data for part in self.parts]
        earlier = before if verb == "store" else pool
        await until(
            lambda: (
                all((a != b).any() for a, b in zip(changed, earlier, strict=True))
                and not copying.done()
            )
        )
        return copying

    async def close(self) -> None:
        self.host.let(copies=True)
        self.tier.close()
        for part in self.parts:
            part.pool.close()
        assert self.host.num_lanes == 0


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()


async def test_the_parts_are_copied_at_the_same_time_and_by_the_engines_alone(
    bench: Bench,
) -> None:
    """Though the blocks are small, of which a kernel would copy more in a second."""
    storing = await bench.hang("store")
    bench.host.let(copies=True)
    await storing
    await bench.tier.load(HASHES[:2], [5, 7])
    assert bench.host.launches == ["copy_batch"] * 4
    for part in bench.parts:
        assert (part.data[[5, 7]] == part.data[[0, 2]]).all()


@pytest.mark.parametrize("verb", ["store", "load"])
async def test_a_cancelled_copy_is_waited_for(bench: Bench, verb: str) -> None:
    await bench.tier.store(HASHES, range(8, 12))
    if verb == "store":  # elsewhere: those are held already
        bench.tier._free += [bench.tier._slot_of.popitem()[1] for _ in range(NUM_SLOTS)]
    copying = await bench.hang(verb)
    for _ in range(2):  # again: it cannot hurry the GPUs
        copying.cancel()
        await asyncio.sleep(0.01)
        assert not copying.done(), "the GPUs still copy"
    bench.host.let(copies=True)
    with pytest.raises(asyncio.CancelledError):
        await copying
    slots = [memory.copy() for memory in bench.slots]
    for part in bench.parts:
        await assert_still(part)
    assert all((a == b).all() for a, b in zip(bench.slots, slots, strict=True))
    assert len(bench.tier._free) + bench.tier.num_held == NUM_SLOTS


async def test_a_store_that_fails_gives_its_slots_and_streams_back(bench: Bench) -> None:
    storing = await bench.hang("store")  # else one part may be cancelled before its copy fails
    bench.host.copy_error = "an illegal address"
    bench.host.let(copies=True)
    with pytest.raises(DeviceError, match="an illegal address"):
        await storing
    assert (bench.tier.num_held, len(bench.tier._free), bench.host.num_lanes) == (0, NUM_SLOTS, 0)
    bench.host.copy_error = ""
    await bench.tier.store(HASHES, range(4))
    assert bench.tier.num_held == NUM_SLOTS


async def test_a_load_that_fails_leaves_what_is_held(bench: Bench) -> None:
    await bench.tier.store(HASHES, range(4))
    bench.host.copy_error = "an illegal address"
    with pytest.raises(DeviceError, match="an illegal address"):
        await bench.tier.load(HASHES[:2], [8, 9])
    bench.host.copy_error = ""
    await bench.tier.load(HASHES[:2], [8, 9])
    assert (bench.parts[1].data[[8, 9]] == bench.parts[1].data[:2]).all()


@pytest.mark.long
async def test_the_memory_is_pinned_once_and_freed_with_the_tier() -> None:
    host = FakeHost()
    blocks = PinnedHostBlocks(3, [100, 300], host.driver())
    assert sorted(map(len, host.pinned.values())) == [300, 900]
    part = DeviceBlocks(host.driver(), SMALL.shard(0, 2), 2, host)
    copies = PinnedCopies(part.pool, blocks)
    del blocks
    gc.collect()
    assert len(host.pinned) == 2, "copies still need it"
    copies.close()
    del copies
    gc.collect()
    assert not host.pinned
    part.pool.close()


def test_what_cannot_be_pinned_leaves_nothing_pinned() -> None:
    host = FakeHost()
    host.most_pinned = 1000
    with pytest.raises(DeviceError, match="cannot pin 900 bytes"):
        PinnedHostBlocks(3, [100, 300], host.driver())
    gc.collect()
    assert not host.pinned
