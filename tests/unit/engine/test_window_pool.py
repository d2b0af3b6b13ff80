"""A pool with companions against a naive model of itself, over random sequences of its verbs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.kv import need
from pdserve.kv.companions import NONE, made_up
from pdserve.shared.errors import OutOfBlocks
from tests.matrix import examples

NUM_BLOCKS, BLOCK, WINDOW = 22, 4, 6
HASHES = [bytes([i]) * 16 for i in range(6)]


@dataclass
class Owner:
    """Of blocks, and of the companions of all but the first few."""

    blocks: list[int]
    num_bare: int


class WindowPoolMachine(RuleBasedStateMachine):
    """Every owner writes a mark of its own into what it allocates, and must find it there."""

    def __init__(self) -> None:
        super().__init__()
        companions = made_up(NUM_BLOCKS, 2)
        assert companions is not None
        self.companions = companions
        self.pool = BlockPool(
            NUM_BLOCKS,
            BLOCK,
            windows=[WINDOW],
            companions=companions,
            bump_generations=self._bump,
        )
        self.owners: list[Owner] = []
        self.written: dict[int, str] = {}  # any block |-> what was written last
        self.hash_of: dict[int, bytes] = {}  # of first blocks whose content is known
        self.heard: set[bytes] = set()
        self.pool.observe(self)

    # As CacheObserver
    def stored(self, block_hash: bytes) -> None:
        self.heard.add(block_hash)

    def evicted(self, block_hash: bytes) -> None:
        self.heard.remove(block_hash)

    def freed(self, block_hash: bytes) -> None:
        assert block_hash in self.heard

    def _bump(self, block_ids: list[int]) -> None:
        if not hasattr(self, "owners"):
            return
        in_use = {b for owner in self.owners for b in self._all_of(owner)}
        assert not in_use & set(block_ids), "tickets of what is in use were voided"

    def _companions_of(self, block_id: int) -> list[int]:
        found: list[int] = self.companions[block_id].tolist()
        return [companion for companion in found if companion != NONE]

    def _all_of(self, owner: Owner) -> list[int]:
        seen = [c for b in owner.blocks[owner.num_bare :] for c in self._companions_of(b)]
        return owner.blocks + seen

    @rule(count=st.integers(0, 5), bare=st.integers(0, 3))
    def allocate(self, count: int, bare: int) -> None:
        bare, in_use = min(bare, count), {b for o in self.owners for b in self._all_of(o)}
        left = self.pool.num_free_after_taking((), count, bare)
        try:
            taken = self.pool.allocate(count, bare)
        except OutOfBlocks:
            assert left < 0
            return
        assert left >= 0
        owner = Owner(taken, bare)
        own = self._all_of(owner)
        assert len(own) == len(set(own)) == count + 2 * (count - bare)
        assert not in_use & set(own), "what somebody sees was given away"
        for block_id in taken:
            self.hash_of.pop(block_id, None)
        for block_id in own:
            self.written[block_id] = f"{id(owner)} {block_id}"
        self.owners.append(owner)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(owner.blocks, owner.num_bare)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def pass_windows(self, data: st.DataObject) -> None:
        owner = self.owners[data.draw(st.integers(0, len(self.owners) - 1))]
        if owner.num_bare < len(owner.blocks):
            owner.num_bare += 1
            self.pool.pass_windows(owner.blocks[owner.num_bare - 1 : owner.num_bare])

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), bare=st.integers(0, 3))
    def retain(self, data: st.DataObject, bare: int) -> None:
        owner = self.owners[data.draw(st.integers(0, len(self.owners) - 1))]
        other = Owner(list(owner.blocks), min(bare, len(owner.blocks)))
        self.pool.retain(other.blocks, other.num_bare)
        self.owners.append(other)

    @precondition(lambda self: any(owner.blocks for owner in self.owners))
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def publish(self, data: st.DataObject, block_hash: bytes) -> None:
        blocks = [b for owner in self.owners for b in owner.blocks]
        block_id = data.draw(st.sampled_from(blocks))
        if block_id not in self.hash_of:
            self.pool.publish(block_id, block_hash)
            self.hash_of[block_id] = block_hash

    @rule(chain=st.lists(st.sampled_from(HASHES), max_size=4, unique=True))
    def take_prefix(self, chain: list[bytes]) -> None:
        expected = self.pool.match_prefix(chain)
        left = self.pool.num_free_after_taking(expected)
        taken = self.pool.take_prefix(chain)
        assert taken == expected
        assert self.pool.num_free == left
        assert [self.hash_of[b] for b in taken] == chain[: len(taken)]
        first = need.window_block(len(taken) * BLOCK + 1, WINDOW, BLOCK)
        assert all(self._companions_of(b) for b in taken[first:]), "windows see what is gone"
        for block_id in taken:
            for each in (block_id, *self._companions_of(block_id)):
                assert self.written[each].endswith(f" {each}")
        self.owners.append(Owner(taken, 0))

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity()
        in_use = {b for owner in self.owners for b in self._all_of(owner)}
        assert self.pool.num_free == (NUM_BLOCKS - len(in_use)) // 3
        with suppress(OutOfBlocks):
            self.pool.release(self.pool.allocate(0))
        assert self.heard == set(self.pool.hashes)


WindowPoolMachine.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40)
test_window_pool = WindowPoolMachine.TestCase
