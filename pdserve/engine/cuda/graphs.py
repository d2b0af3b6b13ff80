"""Decode steps as CUDA graphs: one launch per step instead of a dozen per layer.

A graph replays the captured work on the same memory, so inputs are copied into persistent tensors,
and batches are padded to one of a few sizes. A padding row has no context and no slot: it neither
reads nor writes the pool, and its logits are dropped.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBatch
from pdserve.engine.cuda.forward import StepInputs
from pdserve.engine.ranks.collectives import ALONE, Collectives
from pdserve.engine.steps.batch import Batch

BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # numbers of rows
MAX_GRAPH_BYTES: Final = 2 << 30

_log = logging.getLogger(__name__)


class Recording(Protocol):
    """Captured work."""

    @property
    def num_bytes(self) -> int:
        """GPU memory that the capture took."""

    def replay(self) -> None:
        """Launch the work again, on the current stream."""


class Recorder(Protocol):
    """The part of CUDA that graphs need; tests use a recorder that computes on the CPU."""

    def record(self, work: Callable[[], None]) -> Recording:
        """Run the work at least once, and capture it. The work must not wait for the GPU."""


class DecodeInputs:
    """The tensors that the graphs read. Smaller graphs use the first rows of the same tensors."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_blocks = max_blocks  # of one request
        self._token_ids = zeros(max_rows, dtype=torch.int64)
        self._positions = zeros(max_rows, dtype=torch.int64)
        self._slots = zeros(max_rows, dtype=torch.int64)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._context_lens = zeros(max_rows, dtype=torch.int32)
        self._block_tables = zeros(max_rows, max_blocks, dtype=torch.int32)
        self.clear(0, max_rows)

    def clear(self, first: int, last: int) -> None:
        """Turn the rows [first, last) into padding rows."""
        self._slots[first:last] = -1
        self._context_lens[first:last] = 0

    def fill(self, batch: Batch, num_rows: int) -> None:
        """Copy in a batch that is on the same device, and pad it to `num_rows`."""
        count, width = batch.attention.block_tables.shape
        self._token_ids[:count].copy_(batch.token_ids)
        self._positions[:count].copy_(batch.positions)
        self._slots[:count].copy_(batch.attention.slot_mapping)
        self._context_lens[:count].copy_(batch.attention.context_lens)
        self._block_tables[:count, :width].copy_(batch.attention.block_tables)
        self.clear(count, num_rows)

    def rows(self, num_rows: int) -> StepInputs:
        """Return the first rows, as a step in which every row is sampled."""
        return StepInputs(
            token_ids=self._token_ids[:num_rows],
            positions=self._positions[:num_rows],
            attention=AttentionBatch(
                query_start=self._starts[: num_rows + 1],
                context_lens=self._context_lens[:num_rows],
                block_tables=self._block_tables[:num_rows],
                slot_mapping=self._slots[:num_rows],
            ),
            sampled_rows=None,
        )


class DecodeGraphs:
    """The graphs of one model over one KV pool."""

    def __init__(
        self,
        recorder: Recorder,
        inputs: DecodeInputs,
        logits: Tensor,
        buckets: tuple[int, ...] = BUCKETS,
        max_bytes: int = MAX_GRAPH_BYTES,
        ranks: Collectives = ALONE,
    ) -> None:
        """Prepare, without capturing anything yet.

        Args:
            recorder: captures the graphs.
            inputs: with room for at least the largest bucket.
            logits: [largest bucket, vocab_size] float32, the output of every graph.
            buckets: numbers of rows, ascending.
            max_bytes: once captured graphs take this much memory, no larger ones are captured.
            ranks: agree on which are captured, since they replay the same ones.
        """
        self._recorder = recorder
        self._inputs = inputs
        self._logits = logits
        self._buckets = buckets
        self._max_bytes = max_bytes
        self._ranks = ranks
        self._recordings: list[Recording] = []  # one per bucket, for the first buckets

    def record(self, step: Callable[[StepInputs], Tensor]) -> None:
        """Capture a graph per bucket, smallest first, up to the memory limit.

        Args:
            step: launches a decode step, and returns logits [num_rows, vocab_size] of every row.
        """
        self._inputs.clear(0, self._buckets[-1])
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
        """Whether a graph can compute this step: each request has one row, which is sampled.

        The step must not ask for states either.
        """
        num_rows, width = batch.attention.block_tables.shape
        is_decode = len(batch.token_ids) == len(batch.sampled_rows) == num_rows
        has_room = 0 < num_rows <= self.largest and width <= self._inputs.max_blocks
        return is_decode and batch.states is None and has_room

    def logits(self, batch: Batch) -> Tensor:
        """Return [num_requests, vocab_size] float32 for a batch on the device; see `takes`."""
        num_rows = len(batch.token_ids)
        index = bisect_left(self._buckets, num_rows)
        self._inputs.fill(batch, self._buckets[index])
        self._recordings[index].replay()
        return self._logits[:num_rows]

    def _work(self, step: Callable[[StepInputs], Tensor], bucket: int) -> Callable[[], None]:
        inputs = self._inputs.rows(bucket)

        def work() -> None:
            self._logits[:bucket].copy_(step(inputs))

        return work
