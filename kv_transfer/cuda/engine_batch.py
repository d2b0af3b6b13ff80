"""Many copies by the copy engines in one call: `cuMemcpyBatchAsync` of CUDA's driver.

Called through ctypes, since cupy does not offer it. CUDA's drivers have it in this form from 13.0
on. The interpreter lock is released during the call.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

from kv_transfer.cuda.driver import DeviceError
from kv_transfer.spans.plan import Spans

_LIBRARY: Final = "libcuda.so.1"
_FUNCTION: Final = "cuMemcpyBatchAsync_v2"
_IN_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_KERNELS: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Location(ctypes.Structure):
    """CUmemLocation, which is ignored for memory of CUDA's, on a GPU or pinned on the host."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class EngineBatch:
    """Queues batches of copies on any stream but CUDA's default one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError: the library lacks the function."""
        self._copy = library[_FUNCTION]
        self._copy.restype = ctypes.c_int
        pointer, count = ctypes.c_void_p, ctypes.c_size_t
        self._copy.argtypes = [pointer, pointer, pointer, count, pointer, pointer, count, pointer]
        self._attributes = _Attributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_KERNELS)

    def queue(self, destination: int, source: int, spans: Spans, stream: int) -> None:
        """Queue int64 [n, 3] (source offset, destination offset, nbytes), none of them empty.

        They are copied in any order. The GPU's context must be the thread's current one.

        Raises:
            DeviceError: some were not queued, or CUDA does not know an address.
        """
        # In unsigned numbers, for which an address in the upper half is one too.
        columns = np.ascontiguousarray(spans.T).astype(np.uint64)
        sources = columns[0] + np.uint64(source)
        destinations = columns[1] + np.uint64(destination)
        begin = ctypes.c_size_t(0)  # of the copies that have the attributes: all
        error = self._copy(
            destinations.ctypes.data,
            sources.ctypes.data,
            columns[2].ctypes.data,
            len(spans),
            ctypes.byref(self._attributes),
            ctypes.byref(begin),
            1,
            stream,
        )
        if error:
            raise DeviceError(f"{_FUNCTION} of {len(spans)} copies returned CUDA's error {error}")


def engine_batch(library: str = _LIBRARY) -> EngineBatch | None:
    """What this machine's driver has of it; None: nothing, since it is older."""
    try:
        return EngineBatch(ctypes.CDLL(library))
    except (OSError, AttributeError):
        return None
