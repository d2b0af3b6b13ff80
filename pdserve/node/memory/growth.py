"""Allocates a CPU pool's memory in huge pages, a little ahead of the blocks that are used.

KV blocks lie scattered, and from 4 KiB pages attention reads them at two thirds to three quarters
of the rate that huge pages give. By default, kernels give shared memory no huge pages by
themselves, but make some where a process asks for it. Allocating all of them at the start
(`kv_commit`) would take memory that may never be needed, and a second per GiB.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

log = logging.getLogger(__name__)

_PIECE_BYTES: Final = 32 << 20  # takes some 30 ms, not in the engine's thread
_AHEAD: Final = 2  # number of pieces
_BEGIN_S: Final = 1.0  # a kernel that has to make huge pages first can take half a minute


class Grows(Protocol):
    """A pool whose memory is allocated range by range (`ExportedPool`)."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        ...

    def commit(self, first: int, end: int) -> bool:
        """As ExportedPool.commit."""
        ...


class MemoryGrowth:
    """Grows one pool's memory. Belongs to the event loop; blocks are used in ascending order."""

    def __init__(self, pool: Grows) -> None:
        self._pool = pool
        self._piece = max(1, _PIECE_BYTES // pool.block_bytes)  # blocks
        self._num_committed = 0  # blocks committed, or left to small pages
        self._num_left_out = 1  # number of pieces to leave out if the next one fails
        self._num_used = 0
        self._growing: asyncio.Task[None] | None = None

    async def begin(self, within_s: float = _BEGIN_S) -> None:
        """Allocate the first pieces, so that the first requests do not wait for them.

        Returns after this time in any case: blocks can be used meanwhile, and get small pages.
        """
        self._growing = growing = asyncio.get_running_loop().create_task(self._grow())
        done, _ = await asyncio.wait({growing}, timeout=within_s)
        if not done:
            log.info("the kernel is slow to find huge pages: the node does not wait for them")

    def used(self, num_blocks: int) -> None:
        """Note that `num_blocks` blocks have been used so far; may start growing."""
        self._num_used = num_blocks
        if self._growing is None and self._num_committed < self._wanted(_AHEAD - 1):
            self._growing = asyncio.get_running_loop().create_task(self._grow())

    def _wanted(self, ahead: int) -> int:
        """Return how many blocks are to have memory, this many pieces ahead of the used ones."""
        return min(self._num_used + ahead * self._piece, self._pool.num_blocks)

    async def _grow(self) -> None:
        try:
            while self._num_committed < self._wanted(_AHEAD):
                first = self._num_committed
                end = min(first + self._piece, self._pool.num_blocks)
                is_huge = await asyncio.to_thread(self._commit, first, end)
                self._num_committed = end + self._left_out(is_huge=is_huge)
        finally:
            self._growing = None

    def _left_out(self, *, is_huge: bool) -> int:
        """Return how many blocks after a piece are left to small pages, allocated when touched.

        Memory that is too fragmented for huge pages now may not be so later, so they are requested
        again; but ever less often, since a kernel may have none at all.
        """
        if is_huge:
            self._num_left_out = 1
            return 0
        num_pieces, self._num_left_out = self._num_left_out, 2 * self._num_left_out
        return num_pieces * self._piece

    def _commit(self, first: int, end: int) -> bool:
        try:
            is_huge = self._pool.commit(first, end)
        except OSError as error:
            log.warning("no memory ahead for blocks %d to %d: %s", first, end - 1, error)
            return False
        if not is_huge:
            log.info(
                "no huge pages for blocks %d to %d: their memory comes in small ones",
                first,
                end - 1,
            )
        return is_huge
