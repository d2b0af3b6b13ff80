"""The model runner of a node for `pdserve bench step`: over random KV, without an event loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_transfer.memory import ExportedPool
from pdserve.bench.step.floor_read import StreamingRead
from pdserve.bench.step.measurement import StepTime
from pdserve.engine.kv_cache import TORCH_DTYPES
from pdserve.node.profiling.timer import StepTimer
from pdserve.node.start.model import NodeModel, load_runner
from pdserve.perf_model import StepRow

PRODUCT_ROWS = 512
_RANDOM_BYTES = 8 << 20


class StepBench:
    """Implements `pdserve.bench.step.measurement.Bench` on the CPU."""

    def __init__(self, model: NodeModel, num_threads: int) -> None:
        """Load the model, and fill a pool of `model.num_blocks` with random numbers.

        Raises:
            ModelError: as load_runner.
        """
        self._memory = ExportedPool(model.num_blocks, model.layout.block_bytes)
        self._memory.commit()  # a node's blocks are committed before they are used, too
        self._runner = load_runner(model, self._memory.flat, lambda _: None)
        dtype = TORCH_DTYPES[model.layout.dtype]
        fill_with_numbers(self._memory.flat, dtype)
        # Waiting for a core is not subtracted here: it would look like overhead of the step.
        waits = lambda: nullcontext(lambda: 0.0)  # noqa: E731
        self._timer = StepTimer(self._runner, model.layout.block_size, waits=waits)
        self._read = StreamingRead(num_threads)
        hidden, inner = model.config.hidden_size, model.config.intermediate_size
        self.product_shape = (PRODUCT_ROWS, hidden, 2 * inner)
        self._rows = torch.randn(PRODUCT_ROWS, hidden).to(dtype)
        self._weight = torch.randn(2 * inner, hidden).to(dtype)

    def step(self, rows: Sequence[StepRow]) -> StepTime:
        """As Bench.step."""
        before_s = self._runner.model_s
        total_s = self._timer.seconds(tuple(rows))
        return StepTime(total_s, self._runner.model_s - before_s)

    def read_rate(self) -> float:
        """As Bench.read_rate."""
        return self._read.rate()

    @torch.inference_mode()
    def product_rate(self) -> float:
        """FLOPs per second of torch's linear layer: the model's gate and up, with 512 rows."""
        num_rows, num_in, num_out = self.product_shape
        started_s = time.perf_counter()
        torch.nn.functional.linear(self._rows, self._weight)
        return 2 * num_rows * num_in * num_out / (time.perf_counter() - started_s)

    def close(self) -> None:
        """Release the pool."""
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
