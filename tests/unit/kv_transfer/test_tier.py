"""The host tier: what comes back is what went there, whatever else goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_transfer.cuda.pinned import PinnedCopies, PinnedHostBlocks
from kv_transfer.spans.plan import Spans
from kv_transfer.threads import CancelFlag
from kv_transfer.tier import CpuCopies, FileBlocks, HostTier, TierCopies
from pdserve.shared.errors import ConfigError, CorruptTransfer, StaleTicket
from tests.fakes.gpus import FakeHost
from tests.matrix import examples
from tests.unit.kv_transfer.gpu_pairs import DeviceBlocks
from tests.unit.kv_transfer.pairs import SMALL, make_pool

NUM_BLOCKS = 16


def name(number: int) -> bytes:
    return number.to_bytes(16)


class Follower:
    """Keeps count of what the tier says it holds."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def stored(self, block_hash: bytes) -> None:
        assert block_hash not in self.held
        self.held.add(block_hash)

    def evicted(self, block_hash: bytes) -> None:
        self.held.remove(block_hash)


class GatedCopies:
    """Copies that begin when the test says so."""

    def __init__(self, copies: TierCopies) -> None:
        self.block_bytes = copies.block_bytes
        self.close = copies.close
        self._copies = copies
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = False

    def store(self, spans: Spans, cancel: CancelFlag) -> None:
        assert self.gate.wait(30)
        if self.is_broken:
            raise OSError("the disk is gone")
        self._copies.store(spans, cancel)

    def load(self, spans: Spans, cancel: CancelFlag) -> None:
        assert self.gate.wait(30)
        self._copies.load(spans, cancel)


@dataclass
class Memory:
    """A pool's parts, the copies between each and its tier, and how to close it all."""

    parts: list[NDArray[np.uint8]]  # [NUM_BLOCKS, bytes of a block]
    copies: list[TierCopies]
    close: Callable[[], None]


def in_file(num_slots: int) -> Memory:
    """A pool in CPU memory, and a file."""
    pool = make_pool(SMALL, NUM_BLOCKS)
    blocks = FileBlocks(num_slots, [SMALL.block_bytes], "")
    return Memory([pool.data], [CpuCopies(pool, blocks)], pool.close)


def pinned(num_slots: int, num_gpus: int = 1, *, batches_copies: bool = True) -> Memory:
    """A pool on GPUs, with a part on each, and pinned memory."""
    host = FakeHost()
    host.batches_copies = batches_copies
    layouts = [SMALL.shard(n, num_gpus) for n in range(num_gpus)] if num_gpus > 1 else [SMALL]
    pools = [DeviceBlocks(host.driver(n), of, NUM_BLOCKS, host) for n, of in enumerate(layouts)]
    blocks = PinnedHostBlocks(num_slots, [of.block_bytes for of in layouts], host.driver())
    copies = [PinnedCopies(each.pool, blocks, n) for n, each in enumerate(pools)]

    def close() -> None:
        assert host.num_lanes == 0
        for each in pools:
            each.pool.close()

    return Memory([each.data for each in pools], list(copies), close)


MEMORIES = {
    "file": in_file,
    "gpu": pinned,
    "gpu-one-by-one": partial(pinned, batches_copies=False),
    "two-gpus": partial(pinned, num_gpus=2),
}


class Bench:
    """A tier beside a pool of random content."""

    def __init__(self, kind: str, num_slots: int = 4) -> None:
        self.memory = MEMORIES[kind](num_slots)
        for number, part in enumerate(self.memory.parts):
            rng = np.random.default_rng(number)
            part[:] = rng.integers(0, 256, part.shape, dtype=np.uint8)
        self.copies = [GatedCopies(each) for each in self.memory.copies]
        self.tier = HostTier(num_slots, self.copies)
        self.follower = Follower()
        self.tier.observe(self.follower)

    @property
    def data(self) -> NDArray[np.uint8]:
        """A copy of the pool, the parts of each block side by side: [NUM_BLOCKS, bytes]."""
        return np.concatenate(self.memory.parts, axis=1)

    def clear(self, num_blocks: int) -> None:
        """Overwrite the first blocks of the pool."""
        for part in self.memory.parts:
            part[:num_blocks] = 0

    def hold(self) -> None:
        """Let no copy begin."""
        for each in self.copies:
            each.gate.clear()

    def let(self) -> None:
        for each in self.copies:
            each.gate.set()

    def num_held(self, names: Iterable[bytes]) -> int:
        """How many of the first of these the tier holds."""
        return sum(1 for _ in takewhile(self.tier.__contains__, names))

    def check(self) -> None:
        """The tier's own accounts agree, with no copy under way."""
        tier = self.tier
        assert self.follower.held == set(tier.hashes)
        assert tier.num_held + len(tier._free) == tier.num_blocks
        assert not tier._writing

    def close(self) -> None:
        self.let()
        self.tier.close()
        self.memory.close()


@pytest_asyncio.fixture(params=list(MEMORIES))
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    bench = Bench(request.param)
    yield bench
    bench.check()
    bench.close()


async def test_what_comes_back_is_what_went_there(bench: Bench) -> None:
    content = bench.data
    await bench.tier.store([name(i) for i in range(4)], range(4))
    bench.clear(4)
    await bench.tier.load([name(i) for i in (2, 0, 3)], [9, 4, 11])
    assert (bench.data[[9, 4, 11]] == content[[2, 0, 3]]).all()
    others = [i for i in range(4, NUM_BLOCKS) if i not in (9, 4, 11)]
    assert (bench.data[others] == content[others]).all()
    assert (bench.tier.statistics.stored, bench.tier.statistics.loaded) == (4, 3)
    assert bench.tier.statistics.bytes == 7 * SMALL.block_bytes


async def test_the_least_recently_used_go_first(bench: Bench) -> None:
    await bench.tier.store([name(i) for i in range(4)], range(4))
    await bench.tier.load([name(0)], [9])
    await bench.tier.store([name(1)], [1])  # held already: used
    await bench.tier.store([name(7), name(8)], [7, 8])
    assert set(bench.tier.hashes) == {name(i) for i in (0, 1, 7, 8)}
    assert bench.tier.statistics.evicted == 2


async def test_of_a_chain_the_end_goes_first(bench: Bench) -> None:
    await bench.tier.store([name(i) for i in range(4)], range(4))
    await bench.tier.load([name(i) for i in range(4)], range(8, 12))
    await bench.tier.store([name(7)], [7])
    assert bench.num_held([name(i) for i in range(4)]) == 3


async def test_more_than_fits_is_stored_in_part(bench: Bench) -> None:
    await bench.tier.store([name(i) for i in range(9)], range(9))
    assert bench.num_held([name(i) for i in range(9)]) == 4


async def test_a_block_that_is_being_stored_is_not_held_yet(bench: Bench) -> None:
    bench.hold()
    storing = asyncio.create_task(bench.tier.store([name(0)], [0]))
    await asyncio.sleep(0)
    assert bench.num_held([name(0)]) == 0
    await bench.tier.store([name(0)], [0])  # not a second time
    bench.let()
    await storing
    assert bench.num_held([name(0)]) == 1
    assert bench.tier.statistics.stored == 1


async def test_a_load_whose_slot_was_given_away_is_stale(bench: Bench) -> None:
    await bench.tier.store([name(i) for i in range(4)], range(4))
    bench.hold()
    loading = asyncio.create_task(bench.tier.load([name(0)], [9]))
    await asyncio.sleep(0)
    storing = asyncio.create_task(bench.tier.store([name(i) for i in range(4, 8)], range(4, 8)))
    await asyncio.sleep(0)
    bench.let()
    with pytest.raises(StaleTicket):
        await loading
    await storing
    assert bench.tier.statistics.stale == 1


async def test_a_bit_that_flips_in_the_file_is_found_and_its_block_forgotten() -> None:
    pool = make_pool(SMALL, NUM_BLOCKS, seed=1)
    blocks = FileBlocks(4, [SMALL.block_bytes], "")
    tier, follower = HostTier(4, [CpuCopies(pool, blocks)]), Follower()
    tier.observe(follower)
    await tier.store([name(i) for i in range(3)], range(3))
    at = blocks.regions[0].tobytes().index(pool.data[1].tobytes())
    blocks.regions[0][at + SMALL.block_bytes - 1] ^= 1
    await tier.load([name(0), name(2)], [8, 9])
    with pytest.raises(CorruptTransfer, match="in slot 1 what it was given"):
        await tier.load([name(1)], [10])
    assert follower.held == {name(0), name(2)}
    assert (tier.statistics.corrupt, tier.statistics.loaded, tier.num_held) == (1, 2, 2)
    await tier.store([name(1)], [1])
    await tier.load([name(1)], [10])
    assert (pool.data[10] == pool.data[1]).all()
    tier.close()
    pool.close()


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_store_that_does_not_end_well_gives_its_slots_back(bench: Bench, how: str) -> None:
    bench.hold()
    bench.copies[-1].is_broken = how == "failed"
    storing = asyncio.create_task(bench.tier.store([name(0), name(1)], [0, 1]))
    await asyncio.sleep(0)
    if how == "cancelled":
        storing.cancel()
    bench.let()
    with pytest.raises((asyncio.CancelledError, OSError)):
        await storing
    assert bench.tier.num_held == 0
    bench.check()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "load", "cancel", "turn", "wait"]),
        st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    ),
    max_size=14,
)


@settings(max_examples=examples(60))
@given(kind=st.sampled_from(list(MEMORIES)), steps=STEPS)
def test_no_interleaving_loses_a_slot_or_brings_wrong_bytes(
    kind: str, steps: list[tuple[str, list[int]]]
) -> None:
    async def run() -> None:
        bench = Bench(kind)
        content = bench.data
        under_way: list[asyncio.Task[None]] = []

        async def load(numbers: list[int]) -> None:
            destination = [10 + i for i in range(len(numbers))]
            if not all(name(i) in bench.tier for i in numbers):
                return
            try:
                await bench.tier.load([name(i) for i in numbers], destination)
            except StaleTicket:
                return
            assert (bench.data[destination] == content[numbers]).all()

        loading = False
        for verb, numbers in steps:
            if verb == "store":
                store = bench.tier.store([name(i) for i in numbers], numbers)
                under_way.append(asyncio.create_task(store))
            elif verb == "load" and not loading:
                loading = True  # one at a time: they share their destination
                under_way.append(asyncio.create_task(load(numbers)))
            elif verb == "cancel" and under_way:
                under_way[numbers[0] % len(under_way)].cancel()
            elif verb == "turn":
                await asyncio.sleep(0)
            elif verb == "wait":
                for result in await asyncio.gather(*under_way, return_exceptions=True):
                    assert result is None or isinstance(result, asyncio.CancelledError), result
                under_way.clear()
                loading = False
                bench.check()
        for result in await asyncio.gather(*under_way, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
        bench.check()
        bench.close()

    asyncio.run(run())


def test_a_tier_that_does_not_fit_on_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be made there"):
        FileBlocks(1 << 30, [1 << 30], str(tmp_path))  # an exbibyte
    with pytest.raises(ConfigError, match="nowhere"):
        FileBlocks(1, [4096], str(tmp_path / "nowhere"))


def test_the_file_has_no_name_and_all_its_blocks(tmp_path: Path) -> None:
    blocks = FileBlocks(8, [1 << 16], str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    (region,) = blocks.regions
    assert region.shape == (8 << 16,)
    region[:] = 7
    assert (region == 7).all()
