"""Copies spans between regions of memory, concurrently with the model, in few launches.

Large spans go to the copy engines, by one call for hundreds of them. They leave the multiprocessors
to the model. Small ones, of which an engine would make far fewer in a second, are copied by one
kernel, and so are all of them where CUDA's driver takes no batches.

CUDA promises nothing about the memory of another process that dies meanwhile. It checks addresses
before the engines copy, but not a kernel's, whose error would be one of all further calls in this
process: the node would end. This too is why whole blocks go to the engines.

What goes to pinned host memory or comes from there is always the engines': a kernel would keep its
multiprocessors from the model for as long as the bus takes.
"""

from __future__ import annotations

import queue
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np

from kv_transfer.cuda.driver import MAX_PIECES, DeviceError, Driver, Lane, Region
from kv_transfer.spans.pieces import cut_batches, cut_pieces
from kv_transfer.spans.plan import Spans
from kv_transfer.threads import CancelFlag


@dataclass(frozen=True, slots=True)
class CopySizes:
    """How copies are split."""

    # From this mean size on, spans are copied by the copy engines. (An estimate: what NVLink moves
    # while an engine begins a copy.) Whole blocks of most models are larger.
    min_engine_bytes: int = 256 << 10
    engine_batch: int = 512  # copies of one call, between two checks of the cancel flag
    engine_bytes: int = 1 << 30  # of one call
    pieces: int = MAX_PIECES  # for one launch of the kernel
    engines_only: bool = False  # also where CUDA's driver takes no batches: a call for each copy


# What a step copies up and down may wait for the batch that an engine is at: about a millisecond.
HOST_COPIES: Final = CopySizes(engine_bytes=32 << 20, engines_only=True)


class SpanCopier:
    """Owns its lanes, one per copy in progress. The regions belong to the callers."""

    def __init__(self, driver: Driver, sizes: CopySizes = CopySizes()) -> None:
        self._driver = driver
        self._sizes = sizes
        self._idle: queue.SimpleQueue[Lane] = queue.SimpleQueue()

    def copy(self, destination: Region, source: Region, spans: Spans, cancel: CancelFlag) -> None:
        """Copy int64 [n, 3] (source offset, destination offset, nbytes), and wait for the end.

        Call it on a copy thread. The GPU cannot stop a copy: when `cancel` is set, this returns
        after the copies that were started. Once it has returned or raised, nothing is copied.

        Raises:
            DeviceError: CUDA failed.
            ValueError: a span is not within the regions; then nothing was copied.
        """
        _check(spans, 0, source, "source")
        _check(spans, 1, destination, "destination")
        spans = spans[spans[:, 2] > 0]
        if not len(spans):
            return
        lane = self._take()
        try:
            is_large = spans[:, 2].mean() >= self._sizes.min_engine_bytes
            if self._sizes.engines_only or (is_large and self._driver.batches_copies):
                self._by_engine(lane, destination, source, spans, cancel)
            else:
                self._by_kernel(lane, destination, source, spans, cancel)
        except DeviceError:
            lane.close()
            raise
        self._idle.put(lane)

    def probe(self, region: Region) -> None:
        """Check that the region exists, by reading its last byte. Call it on a copy thread.

        Raises:
            DeviceError: it does not.
        """
        address = self._driver.allocate(1)
        try:
            lane = self._take()
            try:
                # By a copy engine: CUDA refuses an invalid address, whereas a kernel that reads it
                # would destroy the process's whole CUDA context.
                lane.copy(address, region.address + region.num_bytes - 1, 1)
                lane.finish()
            except DeviceError:
                lane.close()
                raise
            self._idle.put(lane)
        finally:
            self._driver.free(address)

    def close(self) -> None:
        """Close the lanes; no copy may be in progress.

        Raises:
            DeviceError: CUDA failed.
        """
        with ExitStack() as closing:  # closes all, even if one fails
            while not self._idle.empty():
                closing.callback(self._idle.get().close)

    def _take(self) -> Lane:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._driver.open_lane()

    def _by_engine(
        self, lane: Lane, destination: Region, source: Region, spans: Spans, cancel: CancelFlag
    ) -> None:
        for batch in cut_batches(spans, self._sizes.engine_batch, self._sizes.engine_bytes):
            if cancel.byte[0]:
                return
            try:
                self._queue(lane, destination.address, source.address, batch)
            finally:
                lane.finish()

    def _queue(self, lane: Lane, destination: int, source: int, batch: Spans) -> None:
        if self._driver.batches_copies:
            lane.copy_batch(destination, source, batch)
            return
        for from_offset, to_offset, num_bytes in batch.tolist():
            lane.copy(destination + to_offset, source + from_offset, num_bytes)

    def _by_kernel(
        self, lane: Lane, destination: Region, source: Region, spans: Spans, cancel: CancelFlag
    ) -> None:
        pieces = cut_pieces(spans)
        for first in range(0, len(pieces), self._sizes.pieces):
            if cancel.byte[0]:
                return
            try:
                batch = pieces[first : first + self._sizes.pieces]
                lane.copy_pieces(destination.address, source.address, batch)
            finally:
                lane.finish()


def _check(spans: Spans, column: int, region: Region, name: str) -> None:
    offsets, lengths = spans[:, column], spans[:, 2]
    # Compared by subtraction, since a sum of hostile numbers could overflow.
    fits = (offsets >= 0) & (lengths >= 0) & (lengths <= region.num_bytes)
    fits &= offsets <= region.num_bytes - lengths
    if not fits.all():
        row = int(np.argmin(fits))
        raise ValueError(
            f"span {row} of the {name} is {lengths[row]} bytes at offset {offsets[row]}, not a "
            f"range within {region.num_bytes} bytes"
        )
