"""The block pool against a naive model of itself, over random sequences of its verbs."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.protocol import Prompt
from pdserve.shared.errors import OutOfBlocks
from tests.matrix import examples

NUM_BLOCKS = 8
HASHES = [bytes([i]) * 16 for i in range(6)]


class BlockPoolMachine(RuleBasedStateMachine):
    """Owners hold references; content is tracked by who wrote a block last."""

    def __init__(self) -> None:
        super().__init__()
        self.generations = [0] * NUM_BLOCKS
        self.pool = BlockPool(NUM_BLOCKS, 4, bump_generations=self._bump)
        self.owners: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # block |-> hash it was published under

    def _bump(self, block_ids: list[int]) -> None:
        held = Counter(b for owner in self.owners for b in owner)
        for block_id in block_ids:
            assert held[block_id] == 0, "a referenced block's tickets were voided"
            self.generations[block_id] += 1

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            assert self.pool.num_free == free
            return
        taken = self.pool.allocate(count)
        held = {b for owner in self.owners for b in owner}
        assert not held & set(taken), "a block was given away twice"
        for block_id in taken:
            self.content.pop(block_id, None)
        self.owners.append(taken)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        before = list(self.generations)
        held = {b for owner in self.owners for b in owner}
        self.pool.release(blocks)
        for block_id in set(blocks) - held:
            assert self.generations[block_id] == before[block_id] + 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        blocks = self.owners[data.draw(st.integers(0, len(self.owners) - 1))]
        self.pool.retain(blocks)
        self.owners.append(list(blocks))

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def publish(self, data: st.DataObject, block_hash: bytes) -> None:
        block_id = data.draw(st.sampled_from([b for owner in self.owners for b in owner]))
        if block_id in self.content or block_hash in self.content.values():
            return  # a block's content does not change, and equal content is published once
        self.pool.publish(block_id, block_hash)
        self.content[block_id] = block_hash

    @rule(chain=st.lists(st.sampled_from(HASHES), max_size=4, unique=True))
    def take_prefix(self, chain: list[bytes]) -> None:
        expected = self.pool.match_prefix(chain)
        left = self.pool.num_free_after_taking(expected)
        taken = self.pool.take_prefix(chain)
        assert taken == expected
        assert self.pool.num_free == left
        assert [self.content[b] for b in taken] == chain[: len(taken)]
        self.owners.append(taken)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity()
        held = {b for owner in self.owners for b in owner}
        assert self.pool.num_free == NUM_BLOCKS - len(held)


BlockPoolMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
test_block_pool = BlockPoolMachine.TestCase


def test_eviction_takes_the_oldest_and_the_tail_of_a_chain_first() -> None:
    pool = BlockPool(3, 4)
    first, second, third = blocks = pool.allocate(3)
    for block_id, block_hash in zip(blocks, HASHES, strict=False):
        pool.publish(block_id, block_hash)
    pool.release([first, second])
    pool.release([third])
    assert pool.allocate(1) == [second]  # the later block of the older chain
    assert pool.match_prefix(HASHES[:1]) == [first]
    assert pool.allocate(2) == [first, third]


def test_uncached_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(2, 4)
    cached, plain = pool.allocate(2)
    pool.publish(cached, HASHES[0])
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1) == [plain]


def test_without_a_prefix_cache_nothing_is_reused() -> None:
    pool = BlockPool(2, 4, prefix_cache=False)
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, HASHES[0])
    pool.release([block_id])
    assert pool.num_cached == 0
    assert pool.match_prefix(HASHES[:1]) == []


def test_listeners_hear_of_freed_blocks_only() -> None:
    pool = BlockPool(2, 4)
    heard: list[int] = []
    pool.on_release(lambda: heard.append(pool.num_free))
    blocks = pool.allocate(1)
    pool.retain(blocks)
    pool.release(blocks)
    assert heard == []
    pool.release(blocks)
    assert heard == [2]


def test_hash_chain_depends_on_every_token_before_and_on_the_salt() -> None:
    assert len(Prompt([1, 2, 3, 4, 5]).hashes(2)) == 2
    assert Prompt([1, 2, 3, 4]).hashes(2)[0] == Prompt([1, 2, 9, 9]).hashes(2)[0]
    assert Prompt([1, 2, 3, 4]).hashes(2)[1] != Prompt([9, 2, 3, 4]).hashes(2)[1]
    assert Prompt([1, 2], "a").hashes(2) != Prompt([1, 2], "b").hashes(2)
    assert Prompt([1, 2], "a").hashes(2) != Prompt([1, 2], "a", is_long=True).hashes(2)
    grown = Prompt([1, 2]).hashes(2)
    Prompt([1, 2]).extend_hashes(grown, lambda start, end: [1, 2, 3, 4][start:end], 4, 2)
    assert grown == Prompt([1, 2, 3, 4]).hashes(2)


def test_no_salt_makes_a_first_block_pass_for_a_later_one() -> None:
    def with_hash_as_salt() -> tuple[int, str]:
        """A token whose block has a hash that a client can send as a salt: one in 13,000."""
        for token_id in count():
            with suppress(UnicodeDecodeError):
                return token_id, Prompt([token_id]).hashes(1)[0].decode()
        raise AssertionError("there is no such token")

    first, salt = with_hash_as_salt()
    assert Prompt([5], salt).hashes(1)[0] != Prompt([first, 5]).hashes(1)[1]


def test_blocks_that_others_hold_too_are_not_freed_by_one_release() -> None:
    pool = BlockPool(6, 4)
    shared, own = pool.allocate(2), pool.allocate(2)
    pool.retain(shared)
    assert pool.num_sole([*shared, *own]) == 2
    assert pool.num_sole([*shared, *shared, *own]) == 4
