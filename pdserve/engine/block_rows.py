"""The block tables of a step's rows as one array, kept up from step to step.

Block tables only grow at their ends as long as they are the same list: a request that gives way
gets another one. So a row is copied once, and from then on takes what was added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import numpy as np
import numpy.typing as npt


class BlockRows:
    """A mirror of block tables, one a row. Not to be changed while a step reads it."""

    def __init__(self) -> None:
        self.array = np.zeros((0, 0), dtype=np.int32)  # [max_rows, max_blocks]; 0 behind a table
        self.num_growths = 0  # times that memory was allocated
        self._tables: list[list[int]] = []  # row |-> whose
        self._num_copied: list[int] = []  # row |-> its first blocks that are in the array

    def holds(self, tables: Sequence[list[int]]) -> bool:
        """Whether the rows are those of these very lists."""
        return len(tables) == len(self._tables) and all(map(is_, tables, self._tables))

    def arrange(self, tables: Sequence[list[int]], num_blocks: Sequence[int]) -> None:
        """Make the rows those of these tables, with the first so many blocks of each.

        Tables that have a row already are moved, and not copied again.
        """
        self.make_room(len(tables), max(num_blocks))
        if not self.holds(tables):
            self._move(tables)
        for row, count in enumerate(num_blocks):
            if self._num_copied[row] < count:
                self.extend(row, count)

    def extend(self, row: int, num_blocks: int) -> None:
        """Copy what the row lacks of its table's first so many blocks; there is room for them."""
        table, num_copied = self._tables[row], self._num_copied[row]
        assert len(table) >= num_blocks, "a scheduled request has blocks for what it computes"
        self.array[row, num_copied:num_blocks] = table[num_copied:num_blocks]
        self._num_copied[row] = num_blocks

    def _move(self, tables: Sequence[list[int]]) -> None:
        row_of = {id(table): row for row, table in enumerate(self._tables)}  # alive: ids differ
        sources = [row_of.get(id(table), -1) for table in tables]
        self.array[: len(tables)] = self.array[sources]
        num_copied = self._num_copied
        self._num_copied = [num_copied[source] if source >= 0 else 0 for source in sources]
        for row, source in enumerate(sources):
            if source < 0:
                self.array[row] = 0
        self._tables = list(tables)

    def make_room(self, num_rows: int, num_blocks: int) -> None:
        """For so many rows of so many blocks."""
        max_rows, max_blocks = self.array.shape
        if num_rows <= max_rows and num_blocks <= max_blocks:
            return
        shape = (grown(max_rows, num_rows), grown(max_blocks, num_blocks))
        array: npt.NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        array[:max_rows, :max_blocks] = self.array
        self.array = array
        self.num_growths += 1


def grown(size: int, wanted: int) -> int:
    """As it is if that is enough; else twice what is wanted, so that it is enough for long."""
    return size if wanted <= size else 2 * wanted
