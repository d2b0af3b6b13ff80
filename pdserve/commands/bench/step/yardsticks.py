"""What a machine can do at best: a plain streaming read, and a large matrix product."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pdserve.engine.cuda.stopwatch import DeviceStopwatch

CPU_ROWS = 512  # of a product
GPU_ROWS = 4096
CPU_READ_BYTES = 256 << 20
GPU_READ_BYTES = 1 << 30
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class ProductShape(NamedTuple):
    """A matrix product, of [num_rows, num_in] and [num_in, num_out]."""

    num_rows: int
    num_in: int
    num_out: int

    @property
    def num_flops(self) -> int:
        """A multiplication and an addition for each pair of numbers that meet."""
        return 2 * self.num_rows * self.num_in * self.num_out


class Yardsticks(Protocol):
    """What a model's steps are compared with."""

    @property
    def product_shape(self) -> ProductShape:
        """Of the product."""
        ...

    @property
    def cache_bytes(self) -> int:
        """The largest cache of what computes; 0 if that is unknown."""
        ...

    def read_rate(self) -> float:
        """Measure a streaming read now, in bytes per second."""
        ...

    def product_rate(self) -> float:
        """Measure a large matrix product now, in FLOPs per second."""
        ...


class CpuYardsticks:
    """Implements Yardsticks for the cores of this process."""

    def __init__(self, width: tuple[int, int], dtype: torch.dtype, num_threads: int) -> None:
        """`width`: inputs and outputs of a product."""
        self.product_shape = ProductShape(CPU_ROWS, *width)
        self.cache_bytes = largest_cache_bytes()
        self._read = StreamingRead(num_threads)
        self._rows = torch.randn(CPU_ROWS, width[0]).to(dtype)
        self._weight = torch.randn(width[1], width[0]).to(dtype)

    def read_rate(self) -> float:
        """As Yardsticks.read_rate."""
        return self._read.rate()

    @torch.inference_mode()
    def product_rate(self) -> float:
        """As Yardsticks.product_rate: by torch's linear layer."""
        started_s = time.perf_counter()
        torch.nn.functional.linear(self._rows, self._weight)
        return self.product_shape.num_flops / (time.perf_counter() - started_s)


class GpuYardsticks:
    """Implements Yardsticks for one GPU or several alike, of which the first is measured."""

    def __init__(
        self,
        width: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        stopwatch: DeviceStopwatch,
        *,
        num_devices: int = 1,
        cache_bytes: int = 0,
        read_bytes: int = GPU_READ_BYTES,
    ) -> None:
        """Allocate what is read and multiplied.

        Args:
            width: inputs and outputs of a product.
            dtype: of the product.
            device: the first GPU.
            stopwatch: measures there.
            num_devices: whose rates add up.
            cache_bytes: of each.
            read_bytes: of a read.
        """
        self.product_shape = ProductShape(GPU_ROWS, *width)
        self.cache_bytes = num_devices * cache_bytes
        self._stopwatch = stopwatch
        self._num_devices = num_devices
        self._words = torch.ones(read_bytes // 4, dtype=torch.float32, device=device)
        self._rows = torch.randn(GPU_ROWS, width[0], dtype=dtype, device=device)
        self._weight = torch.randn(width[1], width[0], dtype=dtype, device=device)

    @torch.inference_mode()
    def read_rate(self) -> float:
        """As Yardsticks.read_rate: by torch's sum."""
        taken_s = self._stopwatch.seconds(self._words.sum)
        return self._num_devices * self._words.nbytes / taken_s

    @torch.inference_mode()
    def product_rate(self) -> float:
        """As Yardsticks.product_rate: by torch's linear layer."""
        taken_s = self._stopwatch.seconds(
            lambda: torch.nn.functional.linear(self._rows, self._weight)
        )
        return self._num_devices * self.product_shape.num_flops / taken_s


class StreamingRead:
    """Memory of its own that a number of threads read: much more than the caches hold.

    NumPy's exclusive or over 64-bit words is as fast as memory: one load and one instruction per 64
    bytes. Each thread has its part, and waits for no other until the end.
    """

    def __init__(self, num_threads: int, num_bytes: int = CPU_READ_BYTES) -> None:
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
