"""The host tier of a pool on GPUs: blocks in pinned memory, which the copy engines reach alone."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.cuda.copier import HOST_COPIES, SpanCopier
from kv_transfer.cuda.driver import Driver, Region
from kv_transfer.cuda.pool import DevicePool
from kv_transfer.spans.plan import Spans
from kv_transfer.threads import CancelFlag
from pdserve import _native


class PinnedHostBlocks:
    """Blocks in pinned host memory, of the same parts as the pool's: a region for each.

    The memory lives as long as this object.
    """

    def __init__(self, num_blocks: int, block_sizes: Sequence[int], driver: Driver) -> None:
        """Pin it all; `block_sizes` are bytes of a block in each part. It takes seconds.

        Raises:
            DeviceError: CUDA cannot pin as much; then nothing is pinned.
        """
        self.num_blocks = num_blocks
        self.regions: list[Region] = []
        for block_bytes in block_sizes:
            size = num_blocks * block_bytes
            address = driver.pin(size)
            # Not at exit: CUDA may be shut down by then, and frees everything itself.
            weakref.finalize(self, driver.unpin, address).atexit = False
            self.regions.append(Region(address, size))


class PinnedCopies:
    """Copies between a part of a pool and pinned memory, on streams of their own.

    Implements TierCopies.
    """

    def __init__(self, pool: DevicePool, blocks: PinnedHostBlocks, part: int = 0) -> None:
        self.block_bytes = pool.block_bytes
        self._pool = pool
        self._blocks = blocks  # whose memory is needed as long as this is
        self._tier = blocks.regions[part]
        memory = (ctypes.c_uint8 * self._tier.num_bytes).from_address(self._tier.address)
        self._bytes: NDArray[np.uint8] = np.ctypeslib.as_array(memory)
        self._copier = SpanCopier(pool.driver, HOST_COPIES)

    def store(self, spans: Spans, cancel: CancelFlag) -> None:
        """Copy (pool offset, tier offset, bytes) spans.

        Raises DeviceError: CUDA failed; nothing is copied any more.
        """
        self._copier.copy(self._tier, self._pool.region, spans, cancel)

    def load(self, spans: Spans, cancel: CancelFlag) -> None:
        """Copy (tier offset, pool offset, bytes) spans. Raises as `store`."""
        self._copier.copy(self._pool.region, self._tier, spans, cancel)

    def take(self, spans: Spans, into: NDArray[np.uint8], cancel: CancelFlag) -> None:
        """As TierCopies.take."""
        _native.copy_spans(into, self._bytes, spans, cancel.byte)

    def put(self, spans: Spans, source: NDArray[np.uint8], cancel: CancelFlag) -> None:
        """As TierCopies.put."""
        _native.copy_spans(self._bytes, source, spans, cancel.byte)

    def close(self) -> None:
        """Release what copies take; none may be in progress. Raises DeviceError: CUDA failed."""
        self._copier.close()
