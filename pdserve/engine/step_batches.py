"""One step after the other laid out as a batch, each as far as possible while the one before runs.

As a rule every request of a step goes on with one token in the next. So that is laid out in
advance (`foresee`), but for what only the step's end tells: its tokens, and blocks that requests
are given for them. If the plan is another one, the batch is laid out anew. Which of the two it is
is read off the requests themselves, so nobody has to say what has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.engine.batch import Batch
from pdserve.engine.block_rows import BlockRows
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.step_arrays import Extent, StepArrays


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """The next step, if everybody in this one goes on."""

    requests: list[Request]
    computed: list[int]  # of each: tokens that have KV by then, which is its token's position
    num_blocks: int  # of the longest, its token's included
    begins_block: list[int]  # rows whose token is the first of a block


class StepBatches:
    """Batches for the steps of one engine, in memory that is kept.

    They are in the host's memory, and good until `lay_out` is called again. Not thread-safe, but a
    batch may be read elsewhere while the next one is foreseen.
    """

    def __init__(self, block_size: int) -> None:
        self.num_foreseen = 0  # batches that were laid out before they were planned
        self.num_anew = 0  # and those that were not
        self._block_size = block_size
        self._block_rows = BlockRows()
        self._arrays = StepArrays()  # of the last batch
        self._spare = StepArrays()  # for the one after it
        self._foreseen: _Foreseen | None = None  # of the batch after the last one
        self._came_true: _Foreseen | None = None  # of the last batch

    @property
    def num_growths(self) -> int:
        """Times that memory was allocated."""
        return sum(part.num_growths for part in (self._block_rows, self._arrays, self._spare))

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """Begin the batch after this one, which is not over: its requests are as before it.

        Nothing is foreseen of a step with a prompt in it of which only a part is computed.
        """
        self._foreseen = None
        if self._came_true is not None:
            self._foreseen = self._one_further(self._came_true)
        elif all(row.samples for row in rows):
            self._foreseen = self._first_look(rows)

    def lay_out(self, rows: Sequence[Scheduled]) -> Batch:
        """A plan as a batch: of each request in turn the next `num_tokens` tokens without KV.

        Args:
            rows: at least one, each of at least one token, for which its request has blocks.
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
        self._arrays, self._spare = self._spare, self._arrays
        return self._arrays.batch(extent, self._block_rows, sampled)

    # ---- as foreseen ---------------------------------------------------------------------------

    def _first_look(self, rows: Sequence[Scheduled]) -> _Foreseen:
        """After a step that was laid out anew."""
        num_rows, spare, size = len(rows), self._spare, self._block_size
        spare.make_room(num_rows, num_rows)
        spare.count_rows(num_rows)
        positions = spare.positions[:num_rows]
        positions[:] = [row.request.num_computed_tokens + row.num_tokens for row in rows]
        spare.context_lens[:num_rows] = positions + 1
        blocks, offsets = np.divmod(positions, size)
        blocks[offsets == 0] = 0  # such a block is not there yet: `_complete` sees to it
        block_ids = self._block_rows.array[spare.sampled_rows[:num_rows], blocks]
        spare.slots[:num_rows] = block_ids.astype(np.int64) * size + offsets
        return self._next([row.request for row in rows])

    def _one_further(self, last: _Foreseen) -> _Foreseen:
        """After a step that had come as it was foreseen: everything is one more."""
        num_rows, spare, arrays = len(last.requests), self._spare, self._arrays
        spare.make_room(num_rows, num_rows)
        spare.count_rows(num_rows)
        np.add(arrays.positions[:num_rows], 1, out=spare.positions[:num_rows])
        np.add(arrays.context_lens[:num_rows], 1, out=spare.context_lens[:num_rows])
        np.add(arrays.slots[:num_rows], 1, out=spare.slots[:num_rows])
        return self._next(last.requests)

    def _next(self, requests: list[Request]) -> _Foreseen:
        """The step whose positions are in the spare arrays."""
        positions = self._spare.positions[: len(requests)]
        begins_block = np.flatnonzero(positions % self._block_size == 0)
        num_blocks = int(positions.max()) // self._block_size + 1
        return _Foreseen(requests, positions.tolist(), num_blocks, begins_block.tolist())

    def _has_come_true(self, foreseen: _Foreseen, rows: Sequence[Scheduled]) -> bool:
        """Whether the plan has the same requests, by their block tables, and all went on.

        Then each lacks the KV of one token, so that its row cannot be of another length.
        """
        return [row.request.num_computed_tokens for row in rows] == foreseen.computed and (
            self._block_rows.holds([row.request.block_table for row in rows])
        )

    def _complete(self, foreseen: _Foreseen) -> Extent:
        """With the tokens that the step before has sampled, and the blocks that they begin."""
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
        samples = [index for index, row in enumerate(rows) if row.samples]
        extent = Extent(len(token_ids), len(rows), len(samples), max(num_blocks))
        arrays.make_room(extent.num_tokens, extent.num_rows)
        arrays.num_counted = 0
        query_start = arrays.query_start[: len(rows) + 1]
        query_start[0] = 0
        np.cumsum(num_tokens, out=query_start[1:])
        arrays.context_lens[: len(rows)] = context_lens
        arrays.token_ids[: extent.num_tokens] = token_ids
        owner = np.repeat(np.arange(len(rows)), num_tokens)  # [num_tokens] row -> its request's
        positions = np.arange(extent.num_tokens) - query_start[owner] + computed[owner]
        arrays.positions[: extent.num_tokens] = positions
        block_ids = self._block_rows.array[owner, positions // size]
        arrays.slots[: extent.num_tokens] = block_ids.astype(np.int64) * size + positions % size
        arrays.sampled_rows[: len(samples)] = query_start[1:][samples] - 1
        return extent, [rows[index].request for index in samples]


def _token_ids(rows: Sequence[Scheduled]) -> list[int]:
    """[num_tokens], request after request."""
    token_ids: list[int] = []
    for row in rows:
        start = row.request.num_computed_tokens
        chunk = row.request.token_slice(start, start + row.num_tokens)
        assert 0 < len(chunk) == row.num_tokens, "a row computes tokens that the request has"
        token_ids += chunk
    return token_ids
