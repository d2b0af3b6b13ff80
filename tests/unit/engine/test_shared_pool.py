"""A pool whose blocks have memory only while they are used, or cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.kv.shared_pool import AHEAD, SharedPool
from pdserve.engine.scheduler import Queues
from pdserve.kv.companions import NONE
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import OutOfBlocks

BLOCK = 4


@dataclass
class Memory:
    """As a ledger would have it."""

    left: int
    wanted: list[int] = field(default_factory=list)
    used: int = 0

    @property
    def num_within_reach(self) -> int:
        return self.left

    def take(self, num_blocks: int) -> bool:
        if num_blocks > self.left:
            return False
        self.left -= num_blocks
        return True

    def took(self, block_ids: Sequence[int]) -> None:
        """Nothing."""

    def want(self, num_blocks: int) -> None:
        self.wanted.append(num_blocks)

    def use(self, num_blocks: int) -> None:
        self.used = num_blocks


def pool_of(memory: Memory, num_blocks: int = 40, num_companions: int = 0) -> SharedPool:
    companions = None
    if num_companions:
        companions = np.full((num_blocks, num_companions), NONE, np.int32)
    return SharedPool(
        num_blocks,
        BLOCK,
        budget=memory,
        bump_generations=lambda _: None,
        windows=[8] if num_companions else [],
        companions=companions,
    )


def test_memory_comes_with_need_and_goes_with_the_need_of_others() -> None:
    memory = Memory(30)
    pool = pool_of(memory)
    assert (pool.num_free, pool.num_within_reach, pool.num_in_all) == (0, 30, 30)
    taken = pool.allocate(10)
    assert (pool.num_free, memory.left, pool.num_used) == (AHEAD, 30 - 10 - AHEAD, 10)
    pool.publish(taken[0], b"hash")
    pool.release(taken)
    assert pool.match_prefix([b"hash"]) == [taken[0]]
    assert len(pool.give_back(5)) == 5
    assert pool.match_prefix([b"hash"]), "free blocks go first"
    assert len(pool.give_back(100)) == 13
    assert not pool.match_prefix([b"hash"]), "then cached ones"
    assert (pool.num_free, pool.num_used) == (0, 0)
    pool.check_integrity()


def test_nothing_that_is_used_is_given_back() -> None:
    pool = pool_of(Memory(30))
    taken = pool.allocate(12)
    given = pool.give_back(100)
    assert not set(given) & set(taken)
    assert pool.num_used == 12
    pool.check_integrity()


def test_who_lacks_memory_asks_others_for_it() -> None:
    memory = Memory(12)
    pool = pool_of(memory)
    queues, told = Queues(pool, ManualClock()), []
    pool.on_release(lambda: told.append(1))
    assert queues.reserve(10 * BLOCK, []) is not None
    assert queues.reserve(10 * BLOCK, []) is None
    assert memory.wanted[-1] == 10
    with pytest.raises(OutOfBlocks):
        pool.allocate(10)
    memory.left += 20
    pool.tell_room()
    assert told == [1]
    assert queues.reserve(10 * BLOCK, []) is not None
    assert memory.wanted[-1] == 0


def test_a_pool_as_large_as_it_may_be_asks_others_for_nothing() -> None:
    memory = Memory(100)
    pool = pool_of(memory, num_blocks=20)
    pool.allocate(16)
    with pytest.raises(OutOfBlocks):
        pool.allocate(10)
    assert memory.wanted[-1] == 4, "no more than it could take"
    pool.allocate(4)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert memory.wanted[-1] == 0, "others would be kept from theirs for nothing"


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["take", "release", "give", "others"]), st.integers(1, 12)),
    max_size=40,
)


@settings(max_examples=60)
@given(OPERATIONS, st.sampled_from([0, 2]))
def test_no_block_is_lost_or_had_without_memory(
    operations: list[tuple[str, int]], num_companions: int
) -> None:
    memory = Memory(25)
    pool = pool_of(memory, 36, num_companions)
    width, in_hand, num_published = 1 + num_companions, [], 0
    for name, number in operations:
        if name == "take":
            try:
                in_hand.append(pool.allocate(number))
            except OutOfBlocks:
                continue
            pool.publish(in_hand[-1][0], str(num_published).encode())
            num_published += 1
        elif name == "release" and in_hand:
            pool.release(in_hand.pop(number % len(in_hand)))
        elif name == "give":
            memory.left += len(pool.give_back(number))
        else:
            memory.left = max(0, memory.left + number - 6)
        pool.check_integrity()
        assert pool.num_used == memory.used == width * sum(map(len, in_hand))
        assert pool.num_within_reach >= pool.num_free >= 0
