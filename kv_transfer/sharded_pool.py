"""The KV pool of a node whose ranks have a GPU each: a part on every one of them.

A block is in all parts under the same id: part r has the layers and KV heads of rank r
(`KvLayout.parts`). Some parts may be on other hosts (`kv_transfer/hosts`).
To other nodes they are one pool, in which blocks are allocated, reused and named by tickets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_transfer.hosts.part_elsewhere import PartElsewhere
from kv_transfer.memory import KvPool, MemoryKind

MAX_RANKS: Final = 64  # of a stage

Bumped = Callable[[Sequence[int]], None]


class ShardedPool:
    """Implements KvPool. Owns its parts."""

    def __init__(self, parts: Sequence[KvPool]) -> None:
        """`parts`: of the ranks in order; new ones, with equally many blocks. One is here."""
        assert len({(part.kind, part.num_blocks) for part in parts}) == 1, "parts are alike"
        self.parts = tuple(parts)
        self.kind: MemoryKind = parts[0].kind
        self.num_blocks = parts[0].num_blocks
        self.block_bytes = sum(part.block_bytes for part in parts)
        self._here = [part for part in parts if not isinstance(part, PartElsewhere)]
        self._bumped: list[Bumped] = []

    @property
    def generations(self) -> NDArray[np.uint64]:
        """Those of any part, since all are bumped together: uint64[num_blocks]."""
        return self._here[0].generations

    def follow_bumps(self, bumped: Bumped) -> None:
        """Call `bumped` with the blocks of every bump from now on, before they are reused."""
        self._bumped.append(bumped)

    def bump(self, block_ids: Sequence[int]) -> None:
        """Make all tickets for these blocks stale; call it *before* they are reused."""
        for part in self._here:
            part.bump(block_ids)
        for bumped in self._bumped:
            bumped(block_ids)

    def close(self) -> None:
        """Stop further processes from mapping the pool."""
        for part in self.parts:
            part.close()


def parts_of(pool: KvPool) -> tuple[KvPool, ...]:
    """The parts of a pool, of which most have one: themselves."""
    return pool.parts if isinstance(pool, ShardedPool) else (pool,)


def parts_here(pool: KvPool) -> dict[int, KvPool]:
    """Those that are on this host, by their numbers."""
    parts = enumerate(parts_of(pool))
    return {number: part for number, part in parts if not isinstance(part, PartElsewhere)}


def part_number(index: int, num_parts: int, num_stages: int) -> int:
    """Return what a pool's part is called in offers, by its index among the parts.

    Those of later stages begin at multiples of MAX_RANKS. So builds that know no stages see that
    numbers are missing, and do not take the parts for ranks of one.
    """
    stage, rank = divmod(index, num_parts // num_stages)
    return stage * MAX_RANKS + rank
