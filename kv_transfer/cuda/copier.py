"""Copies spans between regions of GPU memory, from a copy thread, beside all other work."""

from __future__ import annotations

import queue
from contextlib import ExitStack
from typing import Final

import numpy as np

from kv_transfer.cuda.driver import MAX_PIECES, DeviceError, Driver, Lane, Region
from kv_transfer.pieces import cut_pieces
from kv_transfer.plan import Spans
from kv_transfer.threads import CancelFlag

# From this size on, a span is worth a call of its own: a copy engine then moves it, and the
# multiprocessors stay the model's. (An estimate: about what a link moves while a call is made.)
_MIN_ENGINE_BYTES: Final = 1 << 20
_ENGINE_BATCH: Final = 256  # copies between two looks at the cancel flag


class SpanCopier:
    """Owns its lanes: one for each copy that is under way. The regions are the callers'."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._idle: queue.SimpleQueue[Lane] = queue.SimpleQueue()

    def copy(self, destination: Region, source: Region, spans: Spans, cancel: CancelFlag) -> None:
        """Copy int64 [n, 3] (source offset, destination offset, nbytes); wait until it is done.

        For a copy thread. A copy that was handed to the GPU cannot be stopped: when `cancel` is
        set, this returns after those that were. Whenever it has returned or raised, nothing of it
        goes on.

        Raises:
            DeviceError: CUDA failed.
            ValueError: a span is not within the regions; then nothing was copied.
        """
        _check(spans, 0, source, "source")
        _check(spans, 1, destination, "destination")
        if not len(spans):
            return
        lane = self._take()
        try:
            if spans[:, 2].mean() >= _MIN_ENGINE_BYTES:
                _by_engine(lane, destination, source, spans, cancel)
            else:
                _by_kernel(lane, destination, source, spans, cancel)
        except DeviceError:
            lane.close()
            raise
        self._idle.put(lane)

    def probe(self, region: Region) -> None:
        """Read the region's last byte, to see that it is there. For a copy thread.

        Raises:
            DeviceError: it is not.
        """
        address = self._driver.allocate(1)
        try:
            lane = self._take()
            try:
                # By a copy engine: CUDA refuses an address that is none, whereas a kernel that
                # reads there takes down all that this process has on the GPU.
                lane.copy(address, region.address + region.num_bytes - 1, 1)
                lane.finish()
            except DeviceError:
                lane.close()
                raise
            self._idle.put(lane)
        finally:
            self._driver.free(address)

    def close(self) -> None:
        """Let go of the lanes; no copy is under way.

        Raises:
            DeviceError: CUDA failed.
        """
        with ExitStack() as closing:  # one that fails leaves none of the others open
            while not self._idle.empty():
                closing.callback(self._idle.get().close)

    def _take(self) -> Lane:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._driver.open_lane()


def _by_engine(
    lane: Lane, destination: Region, source: Region, spans: Spans, cancel: CancelFlag
) -> None:
    rows = spans.tolist()
    for first in range(0, len(rows), _ENGINE_BATCH):
        if cancel.byte[0]:
            return
        try:
            for from_offset, to_offset, nbytes in rows[first : first + _ENGINE_BATCH]:
                lane.copy(destination.address + to_offset, source.address + from_offset, nbytes)
        finally:
            lane.finish()


def _by_kernel(
    lane: Lane, destination: Region, source: Region, spans: Spans, cancel: CancelFlag
) -> None:
    pieces = cut_pieces(spans)
    for first in range(0, len(pieces), MAX_PIECES):
        if cancel.byte[0]:
            return
        try:
            batch = pieces[first : first + MAX_PIECES]
            lane.copy_pieces(destination.address, source.address, batch)
        finally:
            lane.finish()


def _check(spans: Spans, column: int, region: Region, name: str) -> None:
    offsets, lengths = spans[:, column], spans[:, 2]
    # Compared by subtraction: a sum of hostile numbers could wrap around.
    fits = (offsets >= 0) & (lengths >= 0) & (lengths <= region.num_bytes)
    fits &= offsets <= region.num_bytes - lengths
    if not fits.all():
        row = int(np.argmin(fits))
        raise ValueError(
            f"span {row} of the {name} is {lengths[row]} bytes at offset {offsets[row]}, not a "
            f"range within {region.num_bytes} bytes"
        )
