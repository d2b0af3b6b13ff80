"""CUDA and NCCL through cupy. Imported only if a GPU is used: see driver.py.

In CUDA the current device is per thread, and any thread may run a job, so every method sets its
device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from kv_transfer.cuda.driver import MAX_PIECES, DeviceError, Region
from kv_transfer.cuda.engine_batch import EngineBatch, engine_batch
from kv_transfer.spans.plan import Spans

log = logging.getLogger(__name__)

_PROBE_BYTES = 256
_LOWEST_PRIORITY = 0  # CUDA's default; higher ones are negative
_THREADS = 256  # per block: 8 warps, each copying one piece
# Half of an H100's multiprocessors; the rest is left to the model. Together they have 1 MiB on its
# way, about what memory at 1 TB/s needs that is a microsecond away.
_MAX_BLOCKS = 64


def no_device() -> str | None:
    """Why no GPU can be used; None: there is one."""
    try:
        return None if runtime.getDeviceCount() else "CUDA finds no GPU"
    except runtime.CUDARuntimeError as error:
        return f"CUDA finds no GPU: {error}"


class CupyDriver:
    """Implements Driver."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._device = cupy.cuda.Device(device)
        with self._current("compile the copy kernel for"):
            self.bus_id = str(runtime.deviceGetPCIBusId(device))
            source = resources.files("kv_transfer.cuda").joinpath("copy_spans.cu").read_text()
            self._kernel = cupy.RawModule(code=source, options=("-std=c++17",)).get_function(
                "copy_spans"
            )
            self._kernel.compile()
        self._batch = self._working_batch()

    @property
    def batches_copies(self) -> bool:
        """Whether its lanes have `copy_batch`."""
        return self._batch is not None

    def allocate(self, num_bytes: int) -> int:
        """Allocate zeroed memory; returns its address.

        Directly from CUDA: memory of an allocator cannot be exported.
        """
        with self._current(f"allocate {num_bytes} bytes on"):
            address = int(runtime.malloc(num_bytes))
            runtime.memset(address, 0, num_bytes)
            runtime.deviceSynchronize()
            return address

    def free(self, address: int) -> None:
        """Free an allocation."""
        with self._current("free memory on"):
            runtime.free(address)

    def pin(self, num_bytes: int) -> int:
        """Allocate host memory that every GPU copies to and from by itself; returns its address.

        Portable: pinned for all GPUs of this process.
        """
        with self._current(f"pin {num_bytes} bytes of host memory for"):
            return int(runtime.hostAlloc(num_bytes, runtime.hostAllocPortable))

    def unpin(self, address: int) -> None:
        """Free what `pin` has allocated, which nothing may be copying."""
        with self._current("free pinned memory of"):
            runtime.freeHost(address)

    def export(self, address: int) -> bytes:
        """The handle (IPC_HANDLE_BYTES) with which another process on this host can open it."""
        with self._current("export memory of"):
            return bytes(runtime.ipcGetMemHandle(address))

    def open(self, handle: bytes) -> int:
        """Open another process's allocation; returns its address in this process.

        With cupy's default flag CUDA enables access between the two GPUs.
        """
        with self._current("open another process's memory on"):
            return int(runtime.ipcOpenMemHandle(handle))

    def close(self, address: int) -> None:
        """Close an opened allocation, which nothing may be reading."""
        with self._current("close another process's memory on"):
            runtime.ipcCloseMemHandle(address)

    def open_lane(self) -> CupyLane:
        """A new lane."""
        with self._current("make a stream on"):
            return CupyLane(self._device, self._kernel, self._batch)

    def new_communicator_id(self) -> bytes:
        """An id with which two processes can join a new communicator; a secret between them."""
        from cupy.cuda import nccl

        with self._current("use NCCL on"):
            return bytes(nccl.get_unique_id())

    def join(self, communicator_id: bytes, rank: int) -> CupyCommunicator:
        """Join as rank 0 or 1, and wait for the other one, possibly forever."""
        with self._current("use NCCL on"):
            return CupyCommunicator(self._device, communicator_id, rank)

    def _working_batch(self) -> EngineBatch | None:
        """Try batches by a small one: what CUDA refuses here it would refuse of every pull."""
        batch = engine_batch()
        if batch is None:
            log.warning("a kernel makes all copies of KV: CUDA's driver is older than 13.0")
            return None
        with self._current("copy on"):
            lane = CupyLane(self._device, self._kernel, batch)
            address = int(runtime.malloc(2 * _PROBE_BYTES))
            try:
                probe = np.array([[0, _PROBE_BYTES, _PROBE_BYTES]], dtype=np.int64)
                lane.copy_batch(address, address, probe)
                lane.finish()
            except DeviceError as error:
                log.warning("a kernel makes all copies of KV: %s", error)
                return None
            finally:
                runtime.free(address)
                lane.close()
        return batch

    @contextmanager
    def _current(self, doing: str) -> Iterator[None]:
        with _reported(f"cannot {doing} GPU {self.device}"), self._device:
            yield


class CupyLane:
    """Implements Lane."""

    def __init__(self, device: Any, kernel: Any, batch: EngineBatch | None) -> None:
        self._device = device
        self._kernel = kernel
        self._batch = batch
        # Non-blocking: independent of CUDA's default stream, where the model may run.
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=_LOWEST_PRIORITY)
        self._done = cupy.cuda.Event(block=True, disable_timing=True)  # block: sleep, do not spin
        self._table = int(runtime.malloc(MAX_PIECES * 3 * 8))
        self._uploads: list[Spans] = []  # the device may read them until the lane is finished

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Queue one copy between two addresses, by a copy engine.

        CUDA finds out where the addresses are.
        """
        with self._current("copy"):
            runtime.memcpyAsync(
                destination, source, num_bytes, runtime.memcpyDefault, self._stream.ptr
            )

    def copy_batch(self, destination: int, source: int, spans: Spans) -> None:
        """Queue many copies by the copy engines in one call, if the driver `batches_copies`."""
        assert self._batch is not None, "the copier has asked the driver"
        with self._current("copy"):
            self._batch.queue(destination, source, spans, self._stream.ptr)

    def copy_pieces(self, destination: int, source: int, pieces: Spans) -> None:
        """Queue many copies as one kernel.

        The table may be reused: the stream orders uploads and launches.
        """
        table = np.ascontiguousarray(pieces)
        num_blocks = min(_MAX_BLOCKS, -(-len(table) * 32 // _THREADS))
        with self._current("copy"), self._stream:
            runtime.memcpyAsync(
                self._table,
                table.ctypes.data,
                table.nbytes,
                runtime.memcpyHostToDevice,
                self._stream.ptr,
            )
            self._uploads.append(table)
            arguments = (
                np.uint64(destination),
                np.uint64(source),
                np.uint64(self._table),
                np.int32(len(table)),
            )
            self._kernel((num_blocks,), (_THREADS,), arguments)

    def finish(self) -> None:
        """Wait until everything that was queued has ended."""
        with self._current("finish a copy"):
            self._done.record(self._stream)
            self._done.synchronize()
        self._uploads.clear()

    def close(self) -> None:
        """Release the lane, which must be finished."""
        with self._current("close a stream"):
            runtime.free(self._table)

    @contextmanager
    def _current(self, doing: str) -> Iterator[None]:
        with _reported(f"cannot {doing} on GPU {self._device.id}"), self._device:
            yield


class CupyCommunicator:
    """Implements Communicator, on a stream of its own.

    The connections that NCCL makes cannot be authenticated: whoever knows the id can join. NCCL
    also chooses the network interface (NCCL_SOCKET_IFNAME).
    """

    def __init__(self, device: Any, communicator_id: bytes, rank: int) -> None:
        from cupy.cuda import nccl

        self._device = device
        self._peer = 1 - rank
        self._bytes = nccl.NCCL_UINT8
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._done = cupy.cuda.Event(block=True, disable_timing=True)
        self._ending = threading.Lock()
        self._is_aborted = False
        self._communicator = nccl.NcclCommunicator(2, communicator_id, rank)

    def send(self, region: Region) -> None:
        """Send these bytes; wait until the region is not needed any more.

        A single operation needs no NCCL group.
        """
        with self._current("send"):
            self._check_alive()
            self._communicator.send(
                region.address, region.num_bytes, self._bytes, self._peer, self._stream.ptr
            )
            self._finish()

    def receive(self, region: Region) -> None:
        """Wait until the region is filled by the other end's next `send`, of the same size."""
        with self._current("receive"):
            self._check_alive()
            self._communicator.recv(
                region.address, region.num_bytes, self._bytes, self._peer, self._stream.ptr
            )
            self._finish()

    def abort(self) -> None:
        """End waiting calls, and the communicator, on this side."""
        with self._ending:
            if self._is_aborted:
                return
            self._is_aborted = True
        with self._current("abort"):
            self._communicator.abort()

    def _check_alive(self) -> None:
        """The lock is not held during the NCCL call, which may block forever and be aborted."""
        with self._ending:
            if self._is_aborted:
                raise DeviceError("the communicator was aborted")

    def _finish(self) -> None:
        self._done.record(self._stream)
        self._done.synchronize()
        # An aborted operation looks complete, and the communicator cannot be asked any more.
        with self._ending:
            if self._is_aborted:
                raise DeviceError("the communicator was aborted")
            self._communicator.check_async_error()

    @contextmanager
    def _current(self, doing: str) -> Iterator[None]:
        with _reported(f"NCCL cannot {doing} on GPU {self._device.id}"), self._device:
            yield


@contextmanager
def _reported(failure: str) -> Iterator[None]:
    """Convert cupy's errors: those of CUDA, NVRTC and NCCL are all RuntimeErrors."""
    try:
        yield
    except (RuntimeError, cupy.cuda.compiler.CompileException) as error:
        raise DeviceError(f"{failure}: {error}") from error
