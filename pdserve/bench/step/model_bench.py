"""What `pdserve bench step` runs: a node's model over random KV, and the yardsticks beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_transfer.memory import ExportedPool
from pdserve.bench.step.measurement import StepTime
from pdserve.engine.kv.cache import TORCH_DTYPES
from pdserve.node.profiling.timer import StepTimer
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel, load_runner
from pdserve.node.start.ranks import Ranks, start_ranks
from pdserve.perf_model import StepRow

PRODUCT_ROWS = 512
_RANDOM_BYTES = 8 << 20
READ_BYTES = 256 << 20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class StepBench:
    """Implements `pdserve.bench.step.measurement.StepRunner` on the CPU."""

    def __init__(self, model: NodeModel, num_threads: int, cores: CorePlan) -> None:
        """Load the model, and fill a pool of `model.num_blocks` with random numbers.

        Raises:
            ModelError: as load_runner.
        """
        is_alone = model.share.is_alone
        self._memory = ExportedPool(model.num_blocks, model.layout.block_bytes, is_sealed=is_alone)
        self._memory.commit()  # a node's blocks are committed before they are used, too
        self._ranks: Ranks | None = None
        if not is_alone:
            self._ranks = start_ranks(model, cores, self._memory, None)
            self._ranks.wait_mapped()
        self._runner = load_runner(model, self._memory.flat, lambda _: None, ranks=self._ranks)
        dtype = TORCH_DTYPES[model.layout.dtype]
        fill_with_numbers(self._memory.flat, dtype)
        # Waiting for a core is not subtracted here: it would look like overhead of the step.
        waits = lambda: nullcontext(lambda: 0.0)  # noqa: E731
        vocab_size = model.config.vocab_size
        self._timer = StepTimer(self._runner, model.layout.block_size, vocab_size, waits=waits)
        self._read = StreamingRead(num_threads)
        hidden, inner = model.config.hidden_size, max(model.config.inner_widths)
        self.product_shape = (PRODUCT_ROWS, hidden, 2 * inner)
        self._rows = torch.randn(PRODUCT_ROWS, hidden).to(dtype)
        self._weight = torch.randn(2 * inner, hidden).to(dtype)

    def step(self, rows: Sequence[StepRow]) -> StepTime:
        """As StepRunner.step."""
        before_s = self._runner.model_s
        total_s = self._timer.seconds(tuple(rows))
        return StepTime(total_s, self._runner.model_s - before_s)

    def read_rate(self) -> float:
        """As StepRunner.read_rate."""
        return self._read.rate()

    @torch.inference_mode()
    def product_rate(self) -> float:
        """FLOPs per second of torch's linear layer: the model's gate and up, with 512 rows."""
        num_rows, num_in, num_out = self.product_shape
        started_s = time.perf_counter()
        torch.nn.functional.linear(self._rows, self._weight)
        return 2 * num_rows * num_in * num_out / (time.perf_counter() - started_s)

    def close(self) -> None:
        """End the ranks, and release the pool."""
        if self._ranks is not None:
            self._ranks.close()
        self._memory.close()


def fill_with_numbers(flat: NDArray[np.uint8], dtype: torch.dtype) -> None:
    """Fill with normally distributed numbers, which repeat every 8 MiB.

    Untouched pages would all map to one page of zeros, which the CPU caches could hold.
    """
    few: Tensor = torch.randn(_RANDOM_BYTES // dtype.itemsize).to(dtype)
    piece = few.view(torch.uint8).numpy()
    for start in range(0, len(flat), len(piece)):
        part = flat[start : start + len(piece)]
        part[:] = piece[: len(part)]


class StreamingRead:
    """Memory of its own that a number of threads read: much more than the caches hold.

    NumPy's exclusive or over 64-bit words is as fast as memory: one load and one instruction per 64
    bytes. Each thread has its part, and waits for no other until the end.
    """

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
