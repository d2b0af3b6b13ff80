"""What `pdserve bench step` runs: a node's model over random KV, and the yardsticks beside it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_transfer.cuda.pool import PrivatePool
from kv_transfer.memory import ExportedPool, KvPool
from pdserve.commands.bench.step.measurement import StepTime
from pdserve.commands.bench.step.yardsticks import Yardsticks
from pdserve.engine.kv.cache import TORCH_DTYPES, DeviceBuffer
from pdserve.engine.kv.coded_rows import encoded
from pdserve.kv import KvLayout
from pdserve.measured.perf_model import StepRow
from pdserve.node.device_ranks.start import start_device_ranks
from pdserve.node.profiling.timer import StepTimer
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel, load_runner
from pdserve.node.start.other_ranks import OtherRanks
from pdserve.node.start.ranks import start_ranks

_RANDOM_BYTES = 8 << 20


class StepBench:
    """Implements `measurement.StepRunner`, on any device and by any ranks."""

    def __init__(self, model: NodeModel, cores: CorePlan, yardsticks: Yardsticks) -> None:
        """Load the model over a pool of `model.num_blocks`, full of random numbers.

        Raises:
            ModelError, NodeSick: as load_runner.
        """
        of = _on_cores(model, cores) if model.kernels is not None else _on_devices(model, cores)
        self._memory, self._ranks = of.memory, of.ranks
        if self._ranks is not None:
            self._ranks.wait_mapped()
        self._runner = load_runner(model, of.buffer, lambda _: None, ranks=self._ranks)
        # Waiting for a core is not subtracted here: it would look like overhead of the step.
        waits = lambda: nullcontext(lambda: 0.0)  # noqa: E731
        vocab_size = model.config.vocab_size
        self._timer = StepTimer(self._runner, model.layout.block_size, vocab_size, waits=waits)
        self.read_rate = yardsticks.read_rate
        self.product_rate = yardsticks.product_rate

    def step(self, rows: Sequence[StepRow]) -> StepTime:
        """As StepRunner.step."""
        return StepTime(*self._timer.timed(tuple(rows)))

    def close(self) -> None:
        """End the ranks, and release the pool."""
        if self._ranks is not None:
            self._ranks.close()
        self._memory.close()


@dataclass(frozen=True, slots=True)
class _Pool:
    """Where the KV of this process is, and who else computes."""

    memory: KvPool
    buffer: NDArray[np.uint8] | DeviceBuffer
    ranks: OtherRanks | None


def _on_cores(model: NodeModel, cores: CorePlan) -> _Pool:
    """A pool that all ranks share."""
    is_alone = model.share.is_alone
    memory = ExportedPool(model.num_blocks, model.layout.block_bytes, is_sealed=is_alone)
    memory.commit()  # a node's blocks are committed before they are used, too
    fill_with_numbers(memory.flat, model.layout)
    ranks = None if is_alone else start_ranks(model, cores, memory, None)
    return _Pool(memory, memory.flat, ranks)


def _on_devices(model: NodeModel, cores: CorePlan) -> _Pool:
    """Each rank has a pool on its device. Those of the others are zeros, which cost as much."""
    memory = PrivatePool(model.num_blocks, model.layout.block_bytes)
    ranks = start_device_ranks(model, cores, memory) if model.has_device_ranks else None
    num_bytes = model.num_blocks * model.rank_layouts[0].block_bytes
    own = torch.empty(num_bytes, dtype=torch.uint8, device=model.device)
    own.view(TORCH_DTYPES[model.layout.dtype]).normal_()
    return _Pool(memory, own.numpy() if own.device.type == "cpu" else own, ranks)


def fill_with_numbers(flat: NDArray[np.uint8], layout: KvLayout) -> None:
    """Fill with rows of normally distributed numbers, which repeat after about 8 MiB.

    Untouched pages would all map to one page of zeros, which the CPU caches could hold.
    """
    dtype, row_bytes = TORCH_DTYPES[layout.dtype], layout.planes[0].row_bytes
    few: Tensor = torch.randn(_RANDOM_BYTES // row_bytes, layout.head_dim)
    rows = encoded(few, dtype) if layout.dtype.is_coded else few.to(dtype)
    piece = rows.view(torch.uint8).flatten().numpy()
    for start in range(0, len(flat), len(piece)):
        part = flat[start : start + len(piece)]
        part[:] = piece[: len(part)]
