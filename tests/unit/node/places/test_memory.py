"""Two places over one ledger: memory goes to who needs it, and back to the system."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from kv_transfer.memory import ExportedPool
from pdserve._native import Ledger
from pdserve.engine.kv.shared_pool import AHEAD, SharedPool
from pdserve.node.places import memory as place_memory
from pdserve.node.places.memory import PlaceMemory
from pdserve.shared.errors import ConfigError, RequestCancelled
from pdserve.shared.process.may_pass import NotNow

BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 64
BUDGET = NUM_BLOCKS * BLOCK_BYTES


@pytest.fixture
def path() -> Iterator[str]:
    fd = os.memfd_create("ledger", os.MFD_CLOEXEC)
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


class OnePlace:
    """A place that is awake, without a model."""

    def __init__(self, path: str, number: int) -> None:
        self.ledger = Ledger(path, number, BUDGET)
        self.exported = ExportedPool(NUM_BLOCKS, BLOCK_BYTES, is_sealed=False)
        self.memory = PlaceMemory(self.ledger, self.exported)
        self.pool = SharedPool(
            NUM_BLOCKS, 4, budget=self.memory, bump_generations=self.exported.bump
        )
        self.told = asyncio.Event()

    def use(self, number: int) -> list[int]:
        taken = self.pool.allocate(number)
        for block_id in taken:
            self.exported.data[block_id] = 1
            self.pool.publish(block_id, b"%d" % block_id)
        return taken

    @property
    def resident(self) -> int:
        """Blocks that have memory."""
        return os.fstat(self.exported.fd).st_blocks * 512 // BLOCK_BYTES


@asynccontextmanager
async def awake(path: str, number: int, num_floor: int = 8) -> AsyncIterator[OnePlace]:
    place = OnePlace(path, number)
    await place.memory.enter(0, num_floor * BLOCK_BYTES, lambda: None)
    place.memory.begin(place.pool)
    place.pool.on_release(place.told.set)
    try:
        yield place
    finally:
        await place.memory.end()
        place.ledger.leave()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


async def test_cached_blocks_of_one_make_room_for_requests_of_the_other(path: str) -> None:
    async with awake(path, 0) as one, awake(path, 1) as two:
        one.pool.release(one.use(50))
        assert one.pool.num_cached == 50
        assert one.resident >= 50
        assert two.pool.num_within_reach == NUM_BLOCKS - 8, "all but the other's floor"
        assert two.pool.want(30) == 0
        await until(lambda: two.pool.want(30))
        await until(two.told.is_set)
        assert two.pool.num_free >= 30
        assert one.resident <= NUM_BLOCKS - 30 - one.pool.num_used
        assert one.resident == NUM_BLOCKS - len(one.pool._lent)
        one.pool.check_integrity()
        assert one.ledger.held + two.ledger.held <= BUDGET


async def test_nothing_is_freed_while_it_is_given_huge_pages(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, asked = threading.Event(), []

    def commit(first: int, end: int) -> None:
        asked.append((first, end))
        assert may_go_on.wait(30)

    async with awake(path, 0) as one, awake(path, 1) as two:
        monkeypatch.setattr(one.exported, "commit_within", commit)
        one.pool.release(one.use(40))
        await until(lambda: asked)
        assert asked == [(0, 40 + AHEAD)], "they lie together"
        assert two.pool.want(30) == 0
        await asyncio.sleep(0.01)
        assert one.ledger.held == (40 + AHEAD) * BLOCK_BYTES
        may_go_on.set()
        await until(lambda: two.pool.want(30))


async def test_streams_that_end_make_room_where_it_is_lacking(path: str) -> None:
    async with awake(path, 0) as one, awake(path, 1) as two:
        taken = one.use(50)
        assert two.pool.want(20) == 0
        await asyncio.sleep(0)
        assert one.pool.num_used == 50
        assert one.pool.want(4) == 0, "above its share, while the other lacks something"
        one.pool.release(taken[:20])
        await until(lambda: two.pool.want(20))


async def test_a_place_that_is_gone_leaves_its_memory(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_memory, "LOOK_S", 0.05)
    async with awake(path, 0) as one:
        other = OnePlace(path, 1)
        await other.memory.enter(0, 8 * BLOCK_BYTES, lambda: None)
        other.use(40)
        assert one.pool.want(40) == 0
        del other.memory, other.ledger, other.pool  # the process: its lock goes with it
        await until(lambda: one.pool.want(40))
        assert one.pool.num_free == 40 + AHEAD


async def test_a_wake_waits_for_memory_but_not_for_ever(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with awake(path, 0) as one:
        one.pool.release(one.use(50))
        async with awake(path, 1, num_floor=30):
            assert one.ledger.held <= 34 * BLOCK_BYTES
        taken = one.use(60)
        monkeypatch.setattr(place_memory, "ENTER_S", 0.0)
        late = OnePlace(path, 2)
        with pytest.raises(NotNow, match="do not fit into the 4 MiB of this node"):
            await late.memory.enter(1 << 20, 8 * BLOCK_BYTES, lambda: None)
        with pytest.raises(ConfigError, match="beside its other models") as never:
            await late.memory.enter(1 << 20, 41 * BLOCK_BYTES, lambda: None)
        assert not isinstance(never.value, NotNow), "it is no use to start it again"
        one.pool.release(taken)


async def test_what_never_fits_is_refused_at_once(path: str) -> None:
    place = OnePlace(path, 0)
    with pytest.raises(ConfigError, match=r"raise shared\.memory"):
        await place.memory.enter(BUDGET, BLOCK_BYTES, lambda: None)


async def test_a_wake_that_is_kept_out_says_so_and_ends_if_nobody_wants_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_memory, "LOOK_S", 0.05)

    def unwanted() -> None:
        if other.memory.is_kept_out:
            raise RequestCancelled("the node was stopped")

    async with awake(path, 0) as one:
        taken = one.use(60)
        other = OnePlace(path, 1)
        with pytest.raises(RequestCancelled):
            await other.memory.enter(0, 8 * BLOCK_BYTES, unwanted)
        assert not other.memory.is_kept_out
        one.pool.release(taken)
