"""The block tables of a step's rows as one array, updated incrementally from step to step.

As long as a block table is the same list object, it only grows at its end: a preempted request gets
a new list. So each table is copied once; after that, only its new blocks are.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import numpy as np
import numpy.typing as npt


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
