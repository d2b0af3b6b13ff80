"""Reusable memory for the input of steps. Batches are views of it; it grows when needed.

The block tables of a step's rows are one array, updated from step to step. As long as a block table
is the same list object, it only grows at its end: a preempted request gets a new list. So each
table is copied once; after that, only its new blocks are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.attention import AttentionBatch
from pdserve.engine.request import Request
from pdserve.engine.steps.batch import Batch

# Of each request of a step: the digest of its adapter, and the first position that that computes.
Adapted: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]
NO_ADAPTERS: Final[Adapted] = ((), ())


class BlockRows:
    """A mirror of block tables, one per row. Must not be changed while a step reads it."""

    def __init__(self) -> None:
        self.array = np.zeros((0, 0), dtype=np.int32)  # [max_rows, max_blocks], padded with 0
        self.num_growths = 0  # number of allocations
        self._tables: list[list[int]] = []  # row |-> its block table
        self._num_copied: list[int] = []  # row |-> number of leading blocks copied so far

    def holds(self, tables: Sequence[list[int]]) -> bool:
        """Whether the rows mirror exactly these list objects, in this order."""
        return len(tables) == len(self._tables) and all(map(is_, tables, self._tables))

    def arrange(self, tables: Sequence[list[int]], num_blocks: Sequence[int]) -> None:
        """Make the rows mirror these tables, with the first `num_blocks` blocks of each.

        Tables that already have a row are moved instead of being copied again.
        """
        self.make_room(len(tables), max(num_blocks))
        if not self.holds(tables):
            self._move(tables)
        for row, count in enumerate(num_blocks):
            if self._num_copied[row] < count:
                self.extend(row, count)

    def extend(self, row: int, num_blocks: int) -> None:
        """Copy what the row lacks of its table's first `num_blocks` blocks; needs room for them."""
        table, num_copied = self._tables[row], self._num_copied[row]
        assert len(table) >= num_blocks, "a scheduled request has blocks for what it computes"
        self.array[row, num_copied:num_blocks] = table[num_copied:num_blocks]
        self._num_copied[row] = num_blocks

    def _move(self, tables: Sequence[list[int]]) -> None:
        # The tables are alive, so their ids are distinct.
        row_of = {id(table): row for row, table in enumerate(self._tables)}
        sources = [row_of.get(id(table), -1) for table in tables]
        self.array[: len(tables)] = self.array[sources]
        num_copied = self._num_copied
        self._num_copied = [num_copied[source] if source >= 0 else 0 for source in sources]
        for row, source in enumerate(sources):
            if source < 0:
                self.array[row] = 0
        self._tables = list(tables)

    def make_room(self, num_rows: int, num_blocks: int) -> None:
        """Grow the array to at least `num_rows` rows of `num_blocks` blocks."""
        max_rows, max_blocks = self.array.shape
        if num_rows <= max_rows and num_blocks <= max_blocks:
            return
        shape = (grown(max_rows, num_rows), grown(max_blocks, num_blocks))
        array: npt.NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        array[:max_rows, :max_blocks] = self.array
        self.array = array
        self.num_growths += 1


def grown(size: int, wanted: int) -> int:
    """Return `size` if it is enough, else twice `wanted`, so that growing is rare."""
    return size if wanted <= size else 2 * wanted


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of the memory a step uses."""

    num_tokens: int
    num_rows: int
    num_sampled: int
    num_blocks: int  # of the longest context


class StepArrays:
    """All arrays of one step except the block tables. The user of the class fills them in."""

    def __init__(self) -> None:
        self.num_growths = 0  # number of allocations
        self.num_counted = 0  # number of leading rows that are as `count_rows` makes them
        self._views_of: tuple[Extent, int] | None = None
        self._allocate(0, 0)

    def make_room(self, num_tokens: int, num_rows: int) -> None:
        """Make room for this many tokens and rows. The content is lost if the arrays grow."""
        max_tokens, max_rows = len(self.token_ids), len(self.context_lens)
        if num_tokens > max_tokens or num_rows > max_rows:
            self._allocate(grown(max_tokens, num_tokens), grown(max_rows, num_rows))
            self.num_growths += 1

    def count_rows(self, num_rows: int) -> None:
        """Set up the first `num_rows` rows as rows of one token each, all of them sampled."""
        if self.num_counted < num_rows:
            self.query_start[: num_rows + 1] = range(num_rows + 1)
            self.sampled_rows[:num_rows] = range(num_rows)
            self.num_counted = num_rows

    def batch(
        self,
        extent: Extent,
        block_rows: BlockRows,
        sampled: list[Request],
        adapted: Adapted,
    ) -> Batch:
        """Return a batch of views of the arrays, of the given extent."""
        key = (extent, block_rows.num_growths)
        if key != self._views_of:  # in steady decoding, the last views can be reused
            self._views = self._view(extent, block_rows)
            self._views_of = key
        token_ids, positions, attention, sampled_rows = self._views
        return Batch(token_ids, positions, attention, sampled_rows, sampled, *adapted)

    def _allocate(self, max_tokens: int, max_rows: int) -> None:
        self.token_ids = np.zeros(max_tokens, dtype=np.int64)
        self.positions = np.zeros(max_tokens, dtype=np.int64)  # as those of a Batch
        self.slots = np.zeros(max_tokens, dtype=np.int64)
        self.query_start = np.zeros(max_rows + 1, dtype=np.int32)
        self.context_lens = np.zeros(max_rows, dtype=np.int32)
        self.sampled_rows = np.zeros(max_tokens, dtype=np.int64)
        self.num_counted = 0
        self._views_of = None

    def _view(
        self, extent: Extent, block_rows: BlockRows
    ) -> tuple[Tensor, Tensor, AttentionBatch, Tensor]:
        num_tokens, num_rows, tensor = extent.num_tokens, extent.num_rows, torch.from_numpy
        attention = AttentionBatch(
            query_start=tensor(self.query_start[: num_rows + 1]),
            context_lens=tensor(self.context_lens[:num_rows]),
            block_tables=tensor(block_rows.array[:num_rows, : extent.num_blocks]),
            slot_mapping=tensor(self.slots[:num_tokens]),
        )
        return (
            tensor(self.token_ids[:num_tokens]),
            tensor(self.positions[:num_tokens]),
            attention,
            tensor(self.sampled_rows[: extent.num_sampled]),
        )
