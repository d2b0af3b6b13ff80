"""A pool's memory is taken ahead of the blocks that are used."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading

import pytest

from kv_transfer.memory import ExportedPool
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.node.memory.growth import MemoryGrowth

MIB = 1 << 20
BLOCK = 8 * MIB  # four of them make a piece


class Pool:
    """Says when a range is committed, and lets a test hold that up."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.num_blocks, self.block_bytes = num_blocks, BLOCK
        self.committed: list[tuple[int, int]] = []
        self.is_huge = True
        self.error: OSError | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def commit(self, first: int, end: int) -> bool:
        assert self.may_go_on.wait(30.0)
        self.committed.append((first, end))
        if self.error is not None:
            raise self.error
        return self.is_huge


def growth_of(pool: Pool) -> MemoryGrowth:
    return MemoryGrowth(pool)


async def settled(growth: MemoryGrowth) -> None:
    async with asyncio.timeout(30):
        while growth._growing is not None:
            await growth._growing


async def test_two_pieces_are_there_at_the_start() -> None:
    pool = Pool()
    await growth_of(pool).begin()
    assert pool.committed == [(0, 4), (4, 8)]


async def test_a_kernel_that_takes_long_does_not_hold_up_the_start() -> None:
    pool = Pool()
    growth = growth_of(pool)
    pool.may_go_on.clear()
    await growth.begin(within_s=0.0)
    growth.used(1)
    assert pool.committed == []
    pool.may_go_on.set()
    await settled(growth)
    assert pool.committed == [(0, 4), (4, 8), (8, 12)]  # two pieces beyond the one used meanwhile


async def test_the_next_piece_comes_before_it_is_needed() -> None:
    pool = Pool()
    growth = growth_of(pool)
    await growth.begin()
    growth.used(4)
    await settled(growth)
    assert pool.committed[2:] == []
    growth.used(5)
    await settled(growth)
    assert pool.committed[2:] == [(8, 12), (12, 16)]
    growth.used(16)
    await settled(growth)
    assert pool.committed[4:] == []


async def test_what_is_used_meanwhile_is_seen() -> None:
    pool = Pool(64)
    growth = growth_of(pool)
    await growth.begin()
    pool.may_go_on.clear()
    growth.used(5)
    await asyncio.sleep(0)
    growth.used(20)
    pool.may_go_on.set()
    await settled(growth)
    assert pool.committed[2:] == [(8, 12), (12, 16), (16, 20), (20, 24), (24, 28)]


@pytest.mark.parametrize("error", [None, OSError(errno.ENOMEM, "Cannot allocate memory")])
async def test_without_huge_pages_they_are_asked_for_ever_more_rarely(
    error: OSError | None, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool(64)
    pool.is_huge, pool.error = False, error
    growth = growth_of(pool)
    with caplog.at_level(logging.INFO):
        await growth.begin()
        growth.used(64)
        await settled(growth)
    assert pool.committed == [(0, 4), (8, 12), (20, 24), (40, 44)]
    why = "no memory ahead for blocks 0 to 3" if error else "no huge pages for blocks 0 to 3"
    assert why in caplog.records[0].getMessage()


async def test_when_there_are_huge_pages_again_they_are_taken() -> None:
    pool = Pool(32)
    pool.is_huge = False
    growth = growth_of(pool)
    await growth.begin()
    assert pool.committed == [(0, 4)]
    pool.is_huge = True
    growth.used(16)
    await settled(growth)
    assert pool.committed[1:] == [(8, 12), (12, 16), (16, 20), (20, 24)]


async def test_a_real_pool_has_the_pages_and_its_contents() -> None:
    pool = ExportedPool(40, 1 * MIB)
    pool.data[:3] = 7
    blocks = BlockPool(40, 16)
    growth = MemoryGrowth(pool)
    blocks.on_first_use(growth.used)
    await growth.begin()
    blocks.release(blocks.allocate(33))
    await settled(growth)
    assert (pool.data[:3] == 7).all()
    assert (pool.data[3:] == 0).all()
    pool.close()


def test_a_pool_tells_of_blocks_that_were_never_used() -> None:
    told: list[int] = []
    blocks = BlockPool(8, 16)
    blocks.on_first_use(told.append)
    first = blocks.allocate(2)
    blocks.release(first)
    again = blocks.allocate(2)
    more = blocks.allocate(3)
    assert told == [2, 5]
    assert sorted([*again, *more]) == [0, 1, 2, 3, 4]
