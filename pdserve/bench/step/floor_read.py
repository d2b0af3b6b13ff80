"""The yardstick for memory: a plain streaming read of much more than the caches hold.

Uses NumPy's exclusive or over 64-bit words, which is as fast as memory: one load and one
instruction per 64 bytes. Each thread has its part, and waits for no other until the end.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

READ_BYTES = 256 << 20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class StreamingRead:
    """Memory of its own that a number of threads read."""

    def __init__(self, num_threads: int, num_bytes: int = READ_BYTES) -> None:
        words = np.arange(num_bytes // 8, dtype=np.uint64)  # so that each page is backed by memory
        self._parts = np.array_split(words, num_threads)
        self._threads = ThreadPoolExecutor(max(1, num_threads - 1))

    def rate(self) -> float:
        """Measure the read rate now, in bytes per second."""
        started_s = time.perf_counter()
        others = [self._threads.submit(np.bitwise_xor.reduce, part) for part in self._parts[1:]]
        np.bitwise_xor.reduce(self._parts[0])
        for other in others:
            other.result()
        return sum(part.nbytes for part in self._parts) / (time.perf_counter() - started_s)


def largest_cache_bytes(caches: Path = _CACHES) -> int:
    """Return the largest cache size of the first core, as Linux reports it; 0 if it does not."""
    sizes = [file.read_text().strip() for file in caches.glob("index*/size")]
    return max((int(size[:-1]) * _UNITS[size[-1]] for size in sizes), default=0)
