"""The pools of the transfer benchmark: with known content, in CPU memory or on a GPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kv_transfer.cuda.catalog import open_driver
from kv_transfer.cuda.copier import HOST_COPIES, SpanCopier
from kv_transfer.cuda.driver import DeviceError, Driver, Region
from kv_transfer.cuda.pool import DevicePool
from kv_transfer.memory import ExportedPool, KvPool
from kv_transfer.sharded_pool import ShardedPool
from kv_transfer.threads import CancelFlag
from pdserve.shared.errors import ConfigError, TransportUnavailable

CPU = "cpu"
_PAGE = 4096
_STAGED_BYTES = 64 << 20  # at a time, between the host and a GPU


OpenDriver = Callable[[int], Driver]  # device |-> what it does for this process


class BenchPool(Protocol):
    """A pool whose content both processes know."""

    @property
    def pool(self) -> KvPool:
        """As the transports see it."""
        ...

    def commit(self) -> bool:
        """Allocate all memory now; returns whether it is in huge pages."""
        ...

    def clear(self, block_ids: Sequence[int]) -> None:
        """Overwrite these blocks with zeros."""
        ...

    def block(self, block_id: int) -> NDArray[np.uint8]:
        """The content of a block."""
        ...

    def copy_from(
        self, source: Self, source_ids: Sequence[int], destination_ids: Sequence[int]
    ) -> float:
        """Copy as many bytes as these blocks have, the plainest way; returns the seconds."""
        ...

    def close(self) -> None:
        """Release it."""
        ...


def filled_pool(
    num_blocks: int,
    part_bytes: Sequence[int],
    device: str = CPU,
    open_driver: OpenDriver = open_driver,
    staged_bytes: int = _STAGED_BYTES,
) -> BenchPool:
    """Return a pool with every page touched: the same in both processes, no two pages equal.

    Args:
        num_blocks: of the pool.
        part_bytes: of a block, in each part; as many as a node has ranks.
        device: of the first part; GPUs of the others are behind it.
        open_driver: returns what a GPU does for this process.
        staged_bytes: of pinned memory for each GPU.

    Raises:
        ConfigError: a device cannot be used, or has no room.
    """
    if len(part_bytes) > 1:
        return ShardedBenchPool(
            [
                filled_pool(
                    num_blocks, [own_bytes], device_of_part(device, part), open_driver, staged_bytes
                )
                for part, own_bytes in enumerate(part_bytes)
            ]
        )
    (block_bytes,) = part_bytes
    if device == CPU:
        return CpuBenchPool(num_blocks, block_bytes)
    number = _number(device)
    try:
        return GpuBenchPool(num_blocks, block_bytes, open_driver(number), staged_bytes)
    except (TransportUnavailable, DeviceError) as error:
        raise ConfigError(f"--devices {device}: {error}") from error


def device_of_part(first: str, part: int) -> str:
    """The device of a part, if that of the first one is `first`."""
    return first if first == CPU else f"cuda:{_number(first) + part}"


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def content(blocks: range, block_bytes: int) -> NDArray[np.uint8]:
    """What is in these blocks of every pool: [number of blocks, block_bytes]."""
    noise = np.random.default_rng(block_bytes).integers(0, 256, block_bytes, dtype=np.uint8)
    data = np.tile(noise, (len(blocks), 1))
    pages = data.view(np.uint64)[:, :: _PAGE // 8]
    number = blocks.start * pages.shape[1]  # of the first page
    pages[:] = np.arange(number, number + pages.size, dtype=np.uint64).reshape(pages.shape)
    return data


class CpuBenchPool:
    """Implements BenchPool in memory of the kind that nodes export."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.pool = ExportedPool(num_blocks, block_bytes)
        self.pool.data[:] = content(range(num_blocks), block_bytes)

    def commit(self) -> bool:
        """As BenchPool.commit."""
        return self.pool.commit()

    def clear(self, block_ids: Sequence[int]) -> None:
        """As BenchPool.clear."""
        self.pool.data[block_ids] = 0

    def block(self, block_id: int) -> NDArray[np.uint8]:
        """As BenchPool.block."""
        found: NDArray[np.uint8] = self.pool.data[block_id]
        return found

    def copy_from(
        self, source: CpuBenchPool, source_ids: Sequence[int], destination_ids: Sequence[int]
    ) -> float:
        """As BenchPool.copy_from: block by block, with one thread.

        One numpy assignment per block is one C memcpy; `ctypes.memmove` was slower at 64 KiB (its
        calls cost more) and equal above. Page sizes are the same as in the transfer.
        """
        into, out_of = self.pool.data, source.pool.data
        started_s = time.perf_counter()
        for destination_id, source_id in zip(destination_ids, source_ids, strict=True):
            into[destination_id] = out_of[source_id]
        return time.perf_counter() - started_s

    def close(self) -> None:
        """As BenchPool.close."""
        self.pool.close()


class GpuBenchPool:
    """Implements BenchPool on a GPU; what the host writes or reads goes through pinned memory."""

    def __init__(
        self, num_blocks: int, block_bytes: int, driver: Driver, staged_bytes: int
    ) -> None:
        """Raises DeviceError: there is no room."""
        self.pool = DevicePool(num_blocks, block_bytes, driver)
        at_once = max(1, staged_bytes // block_bytes)
        self._driver = driver
        self._staging = Region(driver.pin(at_once * block_bytes), at_once * block_bytes)
        self._copier = SpanCopier(driver, HOST_COPIES)
        self._lane = driver.open_lane()
        host = (ctypes.c_uint8 * self._staging.num_bytes).from_address(self._staging.address)
        self._host: NDArray[np.uint8] = np.ctypeslib.as_array(host).reshape(at_once, block_bytes)
        for first in range(0, num_blocks, at_once):
            blocks = range(first, min(first + at_once, num_blocks))
            self._host[: len(blocks)] = content(blocks, block_bytes)
            spans = [(0, first * block_bytes, len(blocks) * block_bytes)]
            self._copy(self.pool.region, self._staging, spans)

    def commit(self) -> bool:
        """As BenchPool.commit. It is all there."""
        return False

    def clear(self, block_ids: Sequence[int]) -> None:
        """As BenchPool.clear."""
        size = self.pool.block_bytes
        self._host[0] = 0
        self._copy(self.pool.region, self._staging, [(0, i * size, size) for i in block_ids])

    def block(self, block_id: int) -> NDArray[np.uint8]:
        """As BenchPool.block."""
        size = self.pool.block_bytes
        self._copy(self._staging, self.pool.region, [(block_id * size, 0, size)])
        found: NDArray[np.uint8] = self._host[0].copy()
        return found

    def copy_from(
        self, source: GpuBenchPool, source_ids: Sequence[int], destination_ids: Sequence[int]
    ) -> float:
        """As BenchPool.copy_from: one copy within the GPU, of blocks that lie together."""
        num_bytes = len(source_ids) * self.pool.block_bytes
        started_s = time.perf_counter()
        self._lane.copy(self.pool.region.address, source.pool.region.address, num_bytes)
        self._lane.finish()
        return time.perf_counter() - started_s

    def close(self) -> None:
        """As BenchPool.close."""
        self._lane.close()
        self._copier.close()
        self._driver.unpin(self._staging.address)
        self.pool.close()

    def _copy(
        self, destination: Region, source: Region, spans: Sequence[tuple[int, int, int]]
    ) -> None:
        self._copier.copy(destination, source, np.array(spans, np.int64), CancelFlag())


class ShardedBenchPool:
    """Implements BenchPool with a part for each rank, as nodes whose ranks have a GPU each."""

    def __init__(self, parts: Sequence[BenchPool]) -> None:
        self.pool = ShardedPool([part.pool for part in parts])
        self._parts = parts

    def commit(self) -> bool:
        """As BenchPool.commit."""
        committed = [part.commit() for part in self._parts]
        return all(committed)

    def clear(self, block_ids: Sequence[int]) -> None:
        """As BenchPool.clear."""
        for part in self._parts:
            part.clear(block_ids)

    def block(self, block_id: int) -> NDArray[np.uint8]:
        """As BenchPool.block: its parts one behind the other."""
        return np.concatenate([part.block(block_id) for part in self._parts])

    def copy_from(
        self, source: ShardedBenchPool, source_ids: Sequence[int], destination_ids: Sequence[int]
    ) -> float:
        """As BenchPool.copy_from: the time of the slowest part, as if all were copied at once."""
        parts = zip(self._parts, source._parts, strict=True)
        return max(into.copy_from(of, source_ids, destination_ids) for into, of in parts)

    def close(self) -> None:
        """As BenchPool.close."""
        for part in self._parts:
            part.close()
