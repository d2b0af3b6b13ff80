"""Decode steps as CUDA graphs: one launch per step instead of a dozen per layer.

A graph replays the captured work on the same memory, so batches are copied straight into persistent
tensors, and are padded to one of a few sizes. A padding row has no context and no slot: it neither
reads nor writes the pool, and its logits are dropped.

A graph has one row for each request. The row of a draft is one more of the same block table: keys
of all rows are written before a layer attends, so it sees those before it.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBatch
from pdserve.engine.cuda.copies.packing import Packing
from pdserve.engine.cuda.copies.staging import Staging
from pdserve.engine.cuda.layers.forward import RowTaps, StepInputs
from pdserve.engine.cuda.layers.rows import spread_tables, take_sampled
from pdserve.engine.ranks.collectives import ALONE, Collectives
from pdserve.engine.steps.batch import Batch

BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # numbers of rows
MAX_GRAPH_BYTES: Final = 2 << 30
CARGO_BYTES: Final = 16 << 20  # room for what goes with a batch: a mask is 19 KB at 152k tokens
_MOST_OF_REQUEST: Final = 32  # rows: each reads the whole context, and chunks read it once

_log = logging.getLogger(__name__)


def buckets_for(most_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows of the graphs for steps of up to `most_rows`."""
    if most_rows >= BUCKETS[-1]:
        return BUCKETS
    return (*(bucket for bucket in BUCKETS if bucket < most_rows), most_rows)


class GraphRecording(Protocol):
    """Captured work."""

    @property
    def num_bytes(self) -> int:
        """GPU memory that the capture took."""

    def replay(self) -> None:
        """Launch the work again, on the current stream."""


class Recorder(Protocol):
    """The part of CUDA that graphs need; tests use a recorder that computes on the CPU."""

    def record(self, work: Callable[[], object]) -> GraphRecording:
        """Run the work at least once, and capture it. The work must not wait for the GPU."""

    def record_each(self, works: Sequence[Callable[[], object]]) -> Sequence[GraphRecording]:
        """Do the same with several, in their order, of which each needs what those before made."""


class DecodeInputs:
    """The tensors that the graphs read. Smaller graphs use the first rows of the same tensors.

    What goes up with a step is one piece of memory: the rows' numbers, then their block tables as
    wide as the batch's, then what else the step needs. Tables of one width for all steps would be
    far more to copy, so a kernel of the graph spreads them (`spread_tables`).
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.max_blocks = max_blocks  # of one request
        numbers = Packing(
            [((max_rows,), torch.int64)] * 3 + [((max_rows,), torch.int32), ((1,), torch.int32)]
        )
        self._numbers = torch.zeros(numbers.num_bytes, dtype=torch.uint8)
        on_host = [view.numpy() for view in numbers.views(self._numbers)]
        self._token_ids, self._positions, self._slots, self._context_lens, self._width = on_host
        num_tables = max_rows * max_blocks
        self._memory = torch.zeros(
            numbers.num_bytes + num_tables * 4 + CARGO_BYTES, dtype=torch.uint8, device=device
        )
        self._there = numbers.views(self._memory)
        begin = numbers.num_bytes
        self._tables = self._memory[begin : begin + num_tables * 4].view(torch.int32)
        self._block_tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """Turn all rows on the device into padding rows."""
        _, _, slots, context_lens, _ = self._there
        slots.fill_(-1)
        context_lens.zero_()

    def send(self, batch: Batch, num_rows: int, staging: Staging) -> None:
        """Copy a batch to the device, padded to `num_rows`, and its cargo with it."""
        attention, cargo = batch.attention, batch.cargo
        count, width = attention.block_tables.shape
        self._token_ids[:count] = batch.token_ids.numpy()
        self._token_ids[count:num_rows] = 0  # those of a step that ran ahead were no tokens
        self._positions[:count] = batch.positions.numpy()
        self._slots[:count] = attention.slot_mapping.numpy()
        self._slots[count:num_rows] = -1
        self._context_lens[:count] = attention.context_lens.numpy()
        self._context_lens[count:num_rows] = 0
        self._width[0] = width
        tensors = [self._numbers, attention.block_tables]
        others = [] if cargo is None else cargo.tensors
        if Packing.of([*tensors, *others]).num_bytes > len(self._memory):
            staging.send(tensors, self._memory)
            there = staging.send(others)  # such as penalties for millions of tokens
        else:
            _, _, *there = staging.send([*tensors, *others], self._memory)
        if cargo is not None:
            cargo.arrived = there
        if batch.sampled_before is not None:
            take_sampled(self._there[0][:count], batch.sampled_before)

    def rows(self, num_rows: int) -> StepInputs:
        """Return the first rows, as a step in which every row is sampled."""
        token_ids, positions, slots, context_lens, _ = self._there
        return StepInputs(
            token_ids=token_ids[:num_rows],
            positions=positions[:num_rows],
            attention=AttentionBatch(
                query_start=self._starts[: num_rows + 1],
                context_lens=context_lens[:num_rows],
                block_tables=self._block_tables[:num_rows],
                slot_mapping=slots[:num_rows],
            ),
            sampled_rows=None,
        )

    def spread(self, num_rows: int, block_size: int) -> None:
        """Launch the first work of a graph: the first rows' block tables, as wide as may be."""
        *_, context_lens, width = self._there
        tables = self._block_tables[:num_rows]
        spread_tables(self._tables, width, context_lens[:num_rows], tables, block_size)


class DecodeGraphs:
    """The graphs of one model over one KV pool."""

    def __init__(
        self,
        recorder: Recorder,
        inputs: DecodeInputs,
        logits: Tensor,
        block_size: int,
        buckets: tuple[int, ...] = BUCKETS,
        max_bytes: int = MAX_GRAPH_BYTES,
        ranks: Collectives = ALONE,
        taps: RowTaps | None = None,
    ) -> None:
        """Prepare, without capturing anything yet.

        Args:
            recorder: captures the graphs.
            inputs: with room for at least the largest bucket.
            logits: [largest bucket, vocab_size] float32, the output of every graph.
            block_size: tokens in a block of the pool.
            buckets: numbers of rows, ascending.
            max_bytes: once captured graphs take this much memory, no larger ones are captured.
            ranks: agree on which are captured, since they replay the same ones. Those of the first
                stage take rank 0's tokens, which may be known to its device alone.
            taps: for as many rows as the largest bucket; None: no step has any.
        """
        self._recorder = recorder
        self._inputs = inputs
        self._logits = logits
        self._block_size = block_size
        self._buckets = buckets
        self._max_bytes = max_bytes
        self._ranks = ranks
        self.taps = taps
        self._recordings: list[GraphRecording] = []  # one per bucket, for the first buckets

    def record(self, step: Callable[[StepInputs], Tensor]) -> None:
        """Capture a graph per bucket, smallest first, up to the memory limit.

        Args:
            step: launches a decode step, and returns logits [num_rows, vocab_size] of every row.
        """
        self._inputs.clear()
        num_bytes = 0
        for bucket in self._buckets:
            if num_bytes >= self._max_bytes:
                _log.warning(
                    "CUDA graphs take %d MiB: decode steps of more than %d rows go without",
                    num_bytes >> 20,
                    self.largest,
                )
                return
            recording = self._recorder.record(self._work(step, bucket))
            num_bytes += self._ranks.largest(recording.num_bytes)
            self._recordings.append(recording)
        _log.info("%d CUDA graphs take %d MiB", len(self._recordings), num_bytes >> 20)

    @property
    def largest(self) -> int:
        """Number of rows of the largest graph; 0 if there is none."""
        return self._buckets[len(self._recordings) - 1] if self._recordings else 0

    def takes(self, batch: Batch) -> bool:
        """Whether a graph can compute this step: requests have few rows, and all are sampled.

        The step must not ask for states either.
        """
        num_rows, (num_requests, width) = len(batch.token_ids), batch.attention.block_tables.shape
        if num_rows != len(batch.sampled_rows) or batch.states is not None:
            return False
        has_room = 0 < num_rows <= self.largest and width <= self._inputs.max_blocks
        return has_room and (
            num_rows == num_requests
            or int(np.diff(batch.attention.query_start.numpy()).max()) <= _MOST_OF_REQUEST
        )

    def logits(self, batch: Batch, staging: Staging) -> Tensor:
        """Return [num_tokens, vocab_size] float32 for a batch on the host; see `takes`."""
        num_rows = len(batch.token_ids)
        index = bisect_left(self._buckets, num_rows)
        self._inputs.send(_one_row_each(batch), self._buckets[index], staging)
        self._recordings[index].replay()
        return self._logits[:num_rows]

    def _work(self, step: Callable[[StepInputs], Tensor], bucket: int) -> Callable[[], None]:
        inputs = self._inputs.rows(bucket)
        if (taps := self.taps) is not None:
            inputs = replace(inputs, taps=replace(taps, out=taps.out[:bucket]))

        def work() -> None:
            if self._ranks.shard.is_first_stage:  # others look nothing up
                self._ranks.broadcast(inputs.token_ids)
            self._inputs.spread(bucket, self._block_size)
            self._logits[:bucket].copy_(step(inputs))

        return work


def _one_row_each(batch: Batch) -> Batch:
    """Return the batch as if each row were that of a request of its own."""
    num_rows, attention = len(batch.token_ids), batch.attention
    if num_rows == len(attention.block_tables):
        return batch
    starts = attention.query_start.numpy()
    owner = np.repeat(np.arange(len(starts) - 1), np.diff(starts))  # [num_rows]
    num_behind = starts[1:][owner] - 1 - np.arange(num_rows)  # rows of the same request
    context_lens = attention.context_lens.numpy()[owner] - num_behind
    return replace(
        batch,
        attention=AttentionBatch(
            query_start=torch.arange(num_rows + 1, dtype=torch.int32),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)),
            block_tables=attention.block_tables[torch.from_numpy(owner)],
            slot_mapping=attention.slot_mapping,
        ),
    )
