"""Batches for consecutive steps, prepared as far as possible while the previous step runs.

Usually every request of a step continues with one token in the next step. That batch is laid out in
advance (`foresee`), except for what is only known when the running step ends: the sampled tokens,
and any new blocks for them. If the actual plan differs, the batch is built from scratch. Whether it
differs is derived from the requests themselves, so callers need not report changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.engine.request import Ahead, Request, Scheduled
from pdserve.engine.steps.arrays import NO_ADAPTERS, Adapted, BlockRows, Extent, StepArrays
from pdserve.engine.steps.batch import Batch


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """The predicted next step: every request of the current one continues with one token."""

    requests: list[Request]
    computed: list[int]  # per request: computed tokens by then, and so its next token's position
    num_blocks: int  # of the longest context, the next token included
    begins_block: list[int]  # rows whose token is the first in a block


class StepBatches:
    """Builds the batches for the steps of one engine, in memory that is reused.

    Batches are in host memory and valid until the next call of `lay_out`. Not thread-safe, but
    another thread may read a batch while `foresee` prepares the next one.
    """

    def __init__(self, block_size: int) -> None:
        self.num_foreseen = 0  # batches for which the prediction was right
        self.num_anew = 0  # batches built from scratch
        self._block_size = block_size
        self._block_rows = BlockRows()
        self._arrays = StepArrays()  # of the last batch
        self._spare = StepArrays()  # for the next batch
        self._foreseen: _Foreseen | None = None  # prediction for the next batch
        self._adapted = NO_ADAPTERS  # as of a Batch; of a foreseen one the same
        self._came_true: _Foreseen | None = None  # prediction used for the last batch, if any

    @property
    def num_growths(self) -> int:
        """Number of memory allocations."""
        return sum(part.num_growths for part in (self._block_rows, self._arrays, self._spare))

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """Predict and prepare the batch after this step, which is still running.

        The requests are as they were before the step. Nothing is predicted after a step in which
        some row does not sample, such as a chunk that does not reach the end of its prompt, or may
        go on with several tokens.
        """
        self._foreseen = None
        if self._came_true is not None:
            self._foreseen = self._one_further(self._came_true)
        elif all(row.samples and not row.request.draft for row in rows):
            self._foreseen = self._first_look(rows)

    def lay_out(self, rows: Sequence[Scheduled]) -> Batch:
        """Build the batch of a plan: for each request in order, its next `num_tokens` tokens.

        Args:
            rows: at least one row, each with at least one token and with blocks for its tokens.
        """
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and self._has_come_true(foreseen, rows):
            self.num_foreseen += 1
            self._came_true = foreseen
            extent, sampled = self._complete(foreseen), foreseen.requests
        else:
            self.num_anew += 1
            self._came_true = None
            extent, sampled = self._lay_out_anew(rows)
            self._adapted = _adapted(rows)
        self._arrays, self._spare = self._spare, self._arrays
        return self._arrays.batch(extent, self._block_rows, sampled, self._adapted)

    # ---- as foreseen ---------------------------------------------------------------------------

    def _first_look(self, rows: Sequence[Scheduled]) -> _Foreseen:
        """Predict the batch after one that was built from scratch."""
        num_rows, spare, size = len(rows), self._spare, self._block_size
        spare.make_room(num_rows, num_rows)
        spare.count_rows(num_rows)
        positions = np.array([r.request.num_computed_tokens + r.num_tokens for r in rows])
        spare.positions[:num_rows] = _told_apart(positions, _are_long(rows))
        spare.context_lens[:num_rows] = positions + 1
        blocks, offsets = np.divmod(positions, size)
        blocks[offsets == 0] = 0  # this block is not allocated yet: `_complete` fills it in
        block_ids = self._block_rows.array[spare.sampled_rows[:num_rows], blocks]
        spare.slots[:num_rows] = block_ids.astype(np.int64) * size + offsets
        return self._next([row.request for row in rows])

    def _one_further(self, last: _Foreseen) -> _Foreseen:
        """Predict the batch after one that was itself predicted: all numbers increase by one."""
        num_rows, spare, arrays = len(last.requests), self._spare, self._arrays
        spare.make_room(num_rows, num_rows)
        spare.count_rows(num_rows)
        positions = arrays.positions[:num_rows]
        np.add(positions, np.where(positions < 0, -1, 1), out=spare.positions[:num_rows])
        np.add(arrays.context_lens[:num_rows], 1, out=spare.context_lens[:num_rows])
        np.add(arrays.slots[:num_rows], 1, out=spare.slots[:num_rows])
        return self._next(last.requests)

    def _next(self, requests: list[Request]) -> _Foreseen:
        """Return the prediction whose positions are in the spare arrays."""
        positions = self._spare.context_lens[: len(requests)] - 1
        begins_block = np.flatnonzero(positions % self._block_size == 0)
        num_blocks = int(positions.max()) // self._block_size + 1
        return _Foreseen(requests, positions.tolist(), num_blocks, begins_block.tolist())

    def _has_come_true(self, foreseen: _Foreseen, rows: Sequence[Scheduled]) -> bool:
        """Whether the plan has the predicted requests (same block tables), all advanced.

        If so, each request lacks the KV of exactly one token, so every row has one token.
        """
        return (
            [row.request.num_computed_tokens for row in rows] == foreseen.computed
            and self._block_rows.holds([row.request.block_table for row in rows])
            and sum([row.num_tokens for row in rows]) == len(rows)  # none has a draft
        )

    def _complete(self, foreseen: _Foreseen) -> Extent:
        """Fill in the tokens that the previous step sampled, and the new blocks for them."""
        arrays, size, num_rows = self._spare, self._block_size, len(foreseen.requests)
        arrays.token_ids[:num_rows] = [r.output_token_ids[-1] for r in foreseen.requests]
        self._block_rows.make_room(num_rows, foreseen.num_blocks)
        for row in foreseen.begins_block:
            block = foreseen.computed[row] // size
            self._block_rows.extend(row, block + 1)
            arrays.slots[row] = int(self._block_rows.array[row, block]) * size
        return Extent(num_rows, num_rows, num_rows, foreseen.num_blocks)

    # ---- anew ----------------------------------------------------------------------------------

    def _lay_out_anew(self, rows: Sequence[Scheduled]) -> tuple[Extent, list[Request]]:
        arrays, size = self._spare, self._block_size
        num_tokens = np.array([row.num_tokens for row in rows], dtype=np.int64)
        computed = np.array([row.request.num_computed_tokens for row in rows], dtype=np.int64)
        context_lens = computed + num_tokens
        num_blocks: list[int] = (-(-context_lens // size)).tolist()
        self._block_rows.arrange([row.request.block_table for row in rows], num_blocks)
        token_ids = _token_ids(rows)
        samples = [(index, row.request) for index, row in enumerate(rows) if row.samples]
        num_drafts = sum([len(request.draft) for _, request in samples])
        extent = Extent(len(token_ids), len(rows), len(samples) + num_drafts, max(num_blocks))
        arrays.make_room(extent.num_tokens, extent.num_rows)
        arrays.num_counted = 0
        query_start = arrays.query_start[: len(rows) + 1]
        query_start[0] = 0
        np.cumsum(num_tokens, out=query_start[1:])
        arrays.context_lens[: len(rows)] = context_lens
        arrays.token_ids[: extent.num_tokens] = token_ids
        owner = np.repeat(np.arange(len(rows)), num_tokens)  # [num_tokens] token -> row of plan
        positions = np.arange(extent.num_tokens) - query_start[owner] + computed[owner]
        arrays.positions[: extent.num_tokens] = _told_apart(positions, _are_long(rows)[owner])
        block_ids = self._block_rows.array[owner, positions // size]
        arrays.slots[: extent.num_tokens] = block_ids.astype(np.int64) * size + positions % size
        last_rows = query_start[1:][[index for index, _ in samples]] - 1
        if not num_drafts:
            arrays.sampled_rows[: len(samples)] = last_rows
            return extent, [request for _, request in samples]
        drawn = [
            (request, number, last - len(request.draft) + number)
            for (_, request), last in zip(samples, last_rows.tolist(), strict=True)
            for number in range(1 + len(request.draft))
        ]
        arrays.sampled_rows[: len(drawn)] = [row for _, _, row in drawn]
        return extent, [Ahead.of(r, number) if number else r for r, number, _ in drawn]


def _are_long(rows: Sequence[Scheduled]) -> npt.NDArray[np.bool_]:
    return np.array([row.request.prompt.is_long for row in rows], dtype=np.bool_)


def _adapted(rows: Sequence[Scheduled]) -> Adapted:
    digests = tuple([row.request.prompt.adapter for row in rows])
    if not any(digests):
        return NO_ADAPTERS
    return digests, tuple([row.request.prompt.adapted_from for row in rows])


def _told_apart(
    positions: npt.NDArray[np.int64], are_long: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Positions as those of a Batch."""
    return np.where(are_long, -1 - positions, positions)


def _token_ids(rows: Sequence[Scheduled]) -> list[int]:
    """Return the token ids of all rows, concatenated: [num_tokens]."""
    token_ids: list[int] = []
    for row in rows:
        start = row.request.num_computed_tokens
        chunk = row.request.token_slice(start, start + row.num_tokens - len(row.request.draft))
        chunk += row.request.draft
        assert 0 < len(chunk) == row.num_tokens, "a row computes tokens that the request has"
        token_ids += chunk
    return token_ids
