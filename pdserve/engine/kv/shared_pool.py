"""A pool whose blocks have memory only while they are used, or cached: the rest is for others.

The places of a node share its memory. Each pool could have most of it, and takes it as requests
come. What it does not use it gives back when others lack it: first free blocks, then cached ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.kv.companions import Companions

AHEAD: Final = 8  # blocks that are taken besides, so that not each one is asked for


class Budget(Protocol):
    """Where memory for blocks comes from, in blocks of this pool, companions counted."""

    @property
    def num_within_reach(self) -> int:
        """How many could be taken if others gave back what no request uses."""
        ...

    def take(self, num_blocks: int) -> bool:
        """Take memory for so many; False: there is less."""
        ...

    def took(self, block_ids: Sequence[int]) -> None:
        """Tell which blocks are to have it."""
        ...

    def want(self, num_blocks: int) -> None:
        """Ask others to give memory for so many back; 0: no more."""
        ...

    def use(self, num_blocks: int) -> None:
        """Tell how many blocks requests use."""
        ...


class SharedPool(BlockPool):
    """At first, no block has memory."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        budget: Budget,
        prefix_cache: bool = True,
        bump_generations: Callable[[Sequence[int]], None],
        windows: Sequence[int] = (),
        companions: Companions | None = None,
        state_blocks: int = 0,
    ) -> None:
        """As BlockPool, with memory of the `budget`."""
        super().__init__(
            num_blocks,
            block_size,
            prefix_cache=prefix_cache,
            bump_generations=bump_generations,
            windows=windows,
            companions=companions,
            state_blocks=state_blocks,
        )
        self._budget = budget
        self._lent, self._uncached = self._uncached, []

    @property
    def num_within_reach(self) -> int:
        """As BlockPool.num_within_reach."""
        more = min(len(self._lent), self._budget.num_within_reach)
        return (self.num_unused + more) // self._width

    @property
    def num_in_all(self) -> int:
        """As BlockPool.num_in_all: others may have the rest."""
        return self.num_within_reach + self.num_used // self._width

    @property
    def num_unused(self) -> int:
        """Blocks that have memory and that no request uses, companions counted."""
        return (
            len(self._uncached) + len(self._cached) if self._width == 1 else self._num_free_single
        )

    @property
    def num_used(self) -> int:
        """Blocks that requests use, companions counted."""
        return len(self._references) - len(self._lent) - self.num_unused

    def allocate(self, num_blocks: int, num_bare: int = 0) -> list[int]:
        """As BlockPool.allocate."""
        taken = super().allocate(num_blocks, num_bare)
        self._budget.use(self.num_used)
        return taken

    def take_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """As BlockPool.take_prefix."""
        taken = super().take_prefix(hashes)
        self._budget.use(self.num_used)
        return taken

    def release(self, block_ids: Sequence[int], num_bare: int = 0) -> None:
        """As BlockPool.release."""
        super().release(block_ids, num_bare)
        self._budget.use(self.num_used)

    def want(self, num_blocks: int) -> int:
        """As BlockPool.want."""
        num_before, num_wanted = self.num_free, num_blocks * self._width
        for number in (num_wanted + AHEAD, num_wanted):
            if number <= len(self._lent) and self._budget.take(number):
                taken = [self._lent.pop() for _ in range(number)]
                self._uncached += reversed(taken)  # the first ones are used first
                self._budget.took(taken)
                self._budget.want(0)
                return self.num_free - num_before
        self._budget.want(min(num_wanted, len(self._lent)))  # more it could not take
        return 0

    def give_back(self, num_blocks: int) -> list[int]:
        """Have no memory for so many that no request uses, or fewer; returns which."""
        given = [self._take_free() for _ in range(min(num_blocks, self.num_unused))]
        self._lent += given
        return given

    def tell_room(self) -> None:
        """Tell who waits for free blocks that others have given memory back."""
        for listener in self._release_listeners:
            listener()

    def _without_memory(self) -> set[int]:
        return set(self._lent)
