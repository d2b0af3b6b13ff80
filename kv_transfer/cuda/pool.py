"""KV pools in GPU memory. Their generations are in shared CPU memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_transfer.cuda.driver import Driver, Region
from kv_transfer.memory import GENERATION_BYTES, POOL_SEALS, KvPool, MemoryKind
from pdserve import _native
from pdserve.shared.process.shared_memory import sealed_memory

# CUDA may place several small allocations in one page of this size, and exports whole pages. A pool
# of whole pages shares none, so nothing else is exported with it.
_PAGE_BYTES = 2 << 20


class DevicePool:
    """This process's KV pool on a GPU: one allocation, which other processes can open.

    The allocation outlives `close`, and lives as long as any array made from it (by
    `__cuda_array_interface__`): other processes may still be reading it, and in CUDA it is
    undefined what they read once it is freed.
    """

    kind: MemoryKind = "cuda"

    def __init__(self, num_blocks: int, block_bytes: int, driver: Driver) -> None:
        """Raises DeviceError: the GPU has no room."""
        if num_blocks <= 0 or block_bytes <= 0:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_bytes} bytes cannot be")
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.driver = driver
        size = num_blocks * block_bytes
        address = driver.allocate(-(-size // _PAGE_BYTES) * _PAGE_BYTES)
        self.region = Region(address, size)
        # Not at exit: CUDA may be shut down by then, and frees everything itself.
        weakref.finalize(self, driver.free, address).atexit = False
        size = num_blocks * GENERATION_BYTES
        self.fd, mapping = sealed_memory("pdserve-kv-generations", size, POOL_SEALS)
        self.generations: NDArray[np.uint64] = mapping.view(np.uint64)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The blocks as uint8[num_blocks * block_bytes], for torch and others, without a copy."""
        return _array_of(self.region)

    def bump(self, block_ids: Sequence[int]) -> None:
        """Make all tickets for these blocks stale; call it *before* they are reused."""
        _native.bump_generations(self.generations, np.asarray(block_ids, dtype=np.int64))

    def close(self) -> None:
        """Close the generations' descriptor: nobody new can map the pool. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class OpenedPool:
    """The blocks of a pool that another process of this node has allocated on this GPU.

    They stay opened as long as this process lives, which ends with that one.
    """

    def __init__(self, driver: Driver, handle: bytes, num_bytes: int) -> None:
        """Raises DeviceError: they cannot be opened."""
        self.region = Region(driver.open(handle), num_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """As that of DevicePool."""
        return _array_of(self.region)


class PrivatePool:
    """Stands for a GPU pool that the engine allocates itself, and that no transport can reach.

    For nodes that cannot transfer KV, but can serve in co-located mode.
    """

    kind: MemoryKind = "private"

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.generations: NDArray[np.uint64] = np.zeros(num_blocks, np.uint64)

    def bump(self, block_ids: Sequence[int]) -> None:
        """Make all tickets for these blocks stale; call it *before* they are reused."""
        _native.bump_generations(self.generations, np.asarray(block_ids, dtype=np.int64))

    def close(self) -> None:
        """Nothing to do: it is not shared."""


def _array_of(region: Region) -> dict[str, Any]:
    return {
        "shape": (region.num_bytes,),
        "typestr": "|u1",
        "data": (region.address, False),
        "strides": None,
        "version": 3,
    }


def device_pool(pool: KvPool) -> DevicePool:
    """The pool as a DevicePool, for transports between GPUs."""
    if not isinstance(pool, DevicePool):
        raise TypeError(f"a transport for GPU memory was given a {type(pool).__name__}")
    return pool
