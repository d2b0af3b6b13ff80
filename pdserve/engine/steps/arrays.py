"""Reusable memory for the input of steps. Batches are views of it; it grows when needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.attention import AttentionBatch
from pdserve.engine.request import Request
from pdserve.engine.steps.batch import Batch
from pdserve.engine.steps.block_rows import BlockRows, grown


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

    def batch(self, extent: Extent, block_rows: BlockRows, sampled: list[Request]) -> Batch:
        """Return a batch of views of the arrays, of the given extent."""
        key = (extent, block_rows.num_growths)
        if key != self._views_of:  # in steady decoding, the last views can be reused
            self._views = self._view(extent, block_rows)
            self._views_of = key
        token_ids, positions, attention, sampled_rows = self._views
        return Batch(token_ids, positions, attention, sampled_rows, sampled)

    def _allocate(self, max_tokens: int, max_rows: int) -> None:
        self.token_ids = np.zeros(max_tokens, dtype=np.int64)
        self.positions = np.zeros(max_tokens, dtype=np.int64)  # of each token in its sequence
        self.slots = np.zeros(max_tokens, dtype=np.int64)
        self.query_start = np.zeros(max_rows + 1, dtype=np.int32)
        self.context_lens = np.zeros(max_rows, dtype=np.int32)
        self.sampled_rows = np.zeros(max_rows, dtype=np.int64)
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
