"""Reads of few blocks between pools of one layout, as most are: without arrays, in native calls.

Such a pull costs what its Python does. So it is planned from the lists of ticket and block table:
the rows to move are the same in all blocks but the last one, of which tokens fill only a part.
A transport that has no way of its own for these reads carries out the `planned` one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.checksum import copied_rows, has_whole_words
from kv_transfer.memory import ExportedPool, KvPool
from kv_transfer.spans.box import BlockRun, KvBox
from kv_transfer.spans.plan import plan_spans
from kv_transfer.threads import INLINE_BYTES
from kv_transfer.ticket import Ticket
from kv_transfer.transports.interface import Channel, Read
from pdserve import _native
from pdserve.kv import KvLayout

_MAX_ROWS: Final = 256  # tables that are remembered
_SUM_BYTES: Final = 8


class BlockRows(msgspec.Struct, frozen=True, eq=False):
    """What is moved of each block: [rows, 4], (offset, bytes, first word, unused)."""

    block_bytes: int
    rows: NDArray[np.int64]
    last_rows: NDArray[np.int64]  # of the last block


class BlockRead(msgspec.Struct, eq=False):
    """A read of few blocks."""

    sealed: bytes  # the ticket
    box: KvBox  # the part of it that is read
    num_bytes: int
    layout: KvLayout  # of both pools
    rows: BlockRows
    source_ids: list[int]
    generations: list[int]  # the expected ones
    destination_ids: list[int]
    sums: bytes  # of these blocks, or none
    destination: ExportedPool  # the puller's pool
    wrong: int | None = None  # block whose sum is, or -1; None: nobody has compared them yet

    def planned(self) -> Read:
        """The same read, for any transport; it does not add up."""
        ids = np.array(self.source_ids, dtype=np.int64)
        first = self.box.begin // self.layout.block_size
        source = BlockRun(self.layout, ids, first)
        target = BlockRun(self.layout, np.array(self.destination_ids, dtype=np.int64), first)
        return Read(
            sealed=self.sealed,
            box=self.box,
            block_ids=ids,
            generations=np.array(self.generations, dtype=np.uint64),
            spans=plan_spans(source, target, self.box),
            num_bytes=self.num_bytes,
            destination=self.destination,
        )

    def find_wrong(self) -> int:
        """Index of the first block whose sum is not the ticket's; -1: none."""
        if self.wrong is None:
            rows = self.rows
            self.wrong = _native.find_wrong_block(
                self.destination.flat,
                rows.block_bytes,
                self.destination_ids,
                rows.rows,
                rows.last_rows,
                self.sums,
            )
        return self.wrong


@runtime_checkable
class BlockChannel(Channel, Protocol):
    """A channel that has a way of its own for these reads."""

    async def read_blocks(self, read: BlockRead) -> None:
        """As `read`, of few blocks; it may compare their sums, and say so by `read.wrong`."""
        ...


class BlockPlanner:
    """Plans them, for pools of one layout."""

    def __init__(self, layout: KvLayout, num_groups: int) -> None:
        """Use `planner_of`."""
        self._layout = layout
        self._heads = layout.heads
        self._block_size = layout.block_size
        self._token_bytes = layout.head_bytes * len(layout.heads)  # in a layer
        self._sum_bytes = _SUM_BYTES * len(layout.heads) * num_groups  # of a block

    def rows(self, box: KvBox) -> BlockRows | None:
        """What is moved of the blocks of a box; None: it has not all heads, or is no small one.

        Nor may it begin within a block.
        """
        size, heads = self._block_size, self._heads
        if (
            box.begin % size
            or (box.first_head, box.end_head) != (heads.start, heads.stop)
            or self.num_bytes(box) > INLINE_BYTES
        ):
            return None
        return _block_rows(self._layout, box.first_layer, box.end_layer, box.end % size)

    def num_bytes(self, box: KvBox) -> int:
        """Bytes of a box that has all heads."""
        return (box.end_layer - box.first_layer) * (box.end - box.begin) * self._token_bytes

    def blocks(self, box: KvBox, ticket: Ticket) -> slice:
        """Which blocks of a ticket have the box."""
        size = self._block_size
        origin = ticket.first_token // size
        return slice(box.begin // size - origin, -(-box.end // size) - origin)

    def read(
        self,
        sealed: bytes,
        ticket: Ticket,
        block_table: Sequence[int],
        from_token: int,
        pool: ExportedPool,
    ) -> BlockRead | None:
        """The read of a ticket from this token on; None: one that has to be planned elsewhere.

        Whatever is wrong with the arguments, if anything is, will be found there.
        """
        heads, size = self._heads, self._block_size
        begin, end = max(ticket.first_token, from_token), ticket.end_token
        box = KvBox(begin, end, ticket.first_layer, ticket.end_layer, heads.start, heads.stop)
        rows = self.rows(box) if begin < end else None
        if rows is None or end > size * len(block_table):
            return None
        targets = list(block_table[begin // size : -(-end // size)])
        sums, each = ticket.sums, self._sum_bytes
        if (
            min(targets) < 0
            or max(targets) >= pool.num_blocks
            or (sums and len(sums) != each * len(ticket.block_ids))
        ):
            return None
        part = self.blocks(box, ticket)
        return BlockRead(
            sealed,
            box,
            self.num_bytes(box),
            self._layout,
            rows,
            ticket.block_ids[part],
            ticket.generations[part],
            targets,
            sums[each * part.start : each * part.stop],
            pool,
        )


def planner_of(layout: KvLayout, pool: KvPool, num_groups: int = 1) -> BlockPlanner | None:
    """A planner for this pool; None: it is on a GPU, or its blocks have companions or no words.

    `num_groups`: of layers, which have sums of their own; an exporter compares none.
    """
    is_plain = isinstance(pool, ExportedPool) and not layout.windows and has_whole_words(layout)
    return BlockPlanner(layout, num_groups) if is_plain else None


@lru_cache(_MAX_ROWS)
def _block_rows(layout: KvLayout, first_layer: int, end_layer: int, rest: int) -> BlockRows:
    """`rest`: tokens in the last block; 0: all of it."""
    heads = layout.heads

    def rows(num_slots: int) -> NDArray[np.int64]:
        slots = KvBox(0, num_slots, first_layer, end_layer, heads.start, heads.stop)
        return np.ascontiguousarray(copied_rows(layout, slots))

    whole = rows(layout.block_size)
    return BlockRows(layout.block_bytes, whole, rows(rest) if rest else whole)
