"""The companions of a pool's blocks: which are there, and how many owners still see them.

They are *held* while an owner's windows reach their tokens, and *spare* afterwards: still there,
for a prefix that ends near them, until they are evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdserve.kv.companions import NONE, Companions


class WindowBlocks:
    """Of the first blocks of one pool. `BlockPool` says which blocks these are."""

    def __init__(self, companions: Companions) -> None:
        self.num_spare = 0  # blocks that may be evicted
        self.num_whole = 0  # unreferenced blocks in the prefix cache, companions not counted
        self._table = companions
        self._num_owners = [0] * len(companions)

    def of(self, block_id: int) -> list[int]:
        """Return the companions of a block that has some."""
        found: list[int] = self._table[block_id].tolist()
        return found

    def are_there(self, block_id: int) -> bool:
        """Whether a block has companions."""
        return bool(self._table[block_id, 0] != NONE)

    def are_held(self, block_id: int) -> bool:
        """Whether somebody sees them."""
        return self._num_owners[block_id] > 0

    def are_spare(self, block_id: int) -> bool:
        """Whether a block has some that nobody sees."""
        return self._num_owners[block_id] == 0 and self.are_there(block_id)

    def give(self, block_id: int, companions: Sequence[int]) -> None:
        """Give a new block its companions, with one owner."""
        self._table[block_id] = companions
        self._num_owners[block_id] = 1

    def none_for(self, block_ids: Sequence[int]) -> None:
        """Have new blocks without companions."""
        for block_id in block_ids:
            self._table[block_id] = NONE

    def retain(self, block_id: int) -> bool:
        """Add an owner, if there are any; whether they were spare."""
        if not self.are_there(block_id):
            return False
        self._num_owners[block_id] += 1
        if self._num_owners[block_id] > 1:
            return False
        self.num_spare -= self._table.shape[1]
        return True

    def drop(self, block_id: int) -> bool:
        """Let one owner go, if they have any; whether it was the last one."""
        if not self.are_there(block_id):
            return False
        assert self._num_owners[block_id] > 0, f"companions of block {block_id} are freed twice"
        self._num_owners[block_id] -= 1
        return self._num_owners[block_id] == 0

    def take(self, block_id: int) -> list[int]:
        """Take the companions of a block from it."""
        taken = self.of(block_id)
        self._table[block_id] = NONE
        return taken

    def evict(self, block_id: int) -> list[int]:
        """Take the spare ones of a block from it, if it has any."""
        if not self.are_there(block_id):
            return []
        self.num_spare -= self._table.shape[1]
        return self.take(block_id)

    def check(self, block_ids: Iterable[int], evictable: Mapping[int, None]) -> set[int]:
        """Assert that all is consistent for these first blocks; return all companions."""
        there = [block_id for block_id in block_ids if self.are_there(block_id)]
        found = [companion for block_id in there for companion in self.of(block_id)]
        assert len(found) == len(set(found)), "two blocks have the same companion"
        spare = [block_id for block_id in there if self.are_spare(block_id)]
        assert self.num_spare == len(spare) * self._table.shape[1]
        assert set(spare) <= set(evictable), "companions that nobody sees cannot be evicted"
        return set(found)
