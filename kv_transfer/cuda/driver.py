"""The interface to CUDA: what the KV transfer needs of a GPU.

`cupy_driver.py` is the real implementation, which `catalog.py` opens; `tests/fakes/gpus.py` is one
over host memory, for tests. Methods can be called from any thread, unless they say
otherwise. Those that wait say so, and are never called on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from kv_transfer.spans.plan import Spans
from pdserve.shared.errors import TransferError

MAX_PIECES: Final = 1 << 16  # of one `Lane.copy_pieces`
IPC_HANDLE_BYTES: Final = 64  # CUDA_IPC_HANDLE_SIZE


class DeviceError(TransferError):
    """CUDA or NCCL reported an error."""


@dataclass(frozen=True, slots=True)
class Region:
    """A range of GPU memory, or of pinned host memory, by its address in this process."""

    address: int
    num_bytes: int


class Lane(Protocol):
    """A stream for copies, independent of other work on the GPU. For one thread at a time."""

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Queue one copy between two addresses, by a copy engine.

        Raises:
            DeviceError: it cannot be queued, or CUDA does not know an address.
        """
        ...

    def copy_batch(self, destination: int, source: int, spans: Spans) -> None:
        """Queue many copies by the copy engines in one call, if the driver `batches_copies`.

        `spans` is int64 [n, 3]: (source offset, destination offset, nbytes > 0).

        Raises:
            DeviceError: some were not queued, or CUDA does not know an address.
        """
        ...

    def copy_pieces(self, destination: int, source: int, pieces: Spans) -> None:
        """Queue many copies as one kernel.

        `pieces` is int64 [n <= MAX_PIECES, 3]: (source offset, destination offset, nbytes). They
        are not checked. Each is copied by a warp of 32 threads.

        Raises:
            DeviceError: they cannot be queued.
        """
        ...

    def finish(self) -> None:
        """Wait until everything that was queued has ended.

        Raises:
            DeviceError: some of it failed; nothing is copied any more.
        """
        ...

    def close(self) -> None:
        """Release the lane, which must be finished."""
        ...


class Communicator(Protocol):
    """NCCL between two processes. `send` and `receive` belong to one thread; `abort` to any."""

    def send(self, region: Region) -> None:
        """Send these bytes; wait until the region is not needed any more.

        Raises:
            DeviceError: NCCL failed, or the communicator was aborted.
        """
        ...

    def receive(self, region: Region) -> None:
        """Wait until the region is filled by the other end's next `send`, of the same size.

        Raises:
            DeviceError: as `send`. The region may be written to until `abort` has returned.
        """
        ...

    def abort(self) -> None:
        """End waiting calls, and the communicator, on this side. May itself block, even forever.

        Raises:
            DeviceError: NCCL failed.
        """
        ...


class Driver(Protocol):
    """One GPU, as seen by one process."""

    @property
    def device(self) -> int:
        """Its CUDA ordinal in this process."""
        ...

    @property
    def bus_id(self) -> str:
        """Its PCI address, which identifies it on the host (for NCCL too)."""
        ...

    @property
    def batches_copies(self) -> bool:
        """Whether its lanes have `copy_batch`."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """Allocate zeroed memory; returns its address.

        Raises:
            DeviceError: there is not enough memory.
        """
        ...

    def free(self, address: int) -> None:
        """Free an allocation. May wait for all work on the device."""
        ...

    def pin(self, num_bytes: int) -> int:
        """Allocate host memory that every GPU copies to and from by itself; returns its address.

        Takes seconds for many GiB. The content is undefined.

        Raises:
            DeviceError: CUDA cannot keep that much in place.
        """
        ...

    def unpin(self, address: int) -> None:
        """Free what `pin` has allocated, which nothing may be copying."""
        ...

    def export(self, address: int) -> bytes:
        """The handle (IPC_HANDLE_BYTES) with which another process on this host can open it.

        Raises:
            DeviceError: CUDA IPC does not work here.
        """
        ...

    def open(self, handle: bytes) -> int:
        """Open another process's allocation; returns its address in this process.

        Raises:
            DeviceError: no such allocation, or this GPU cannot access that one.
        """
        ...

    def close(self, address: int) -> None:
        """Close an opened allocation, which nothing may be reading."""
        ...

    def open_lane(self) -> Lane:
        """A new lane. Raises DeviceError: not enough memory."""
        ...

    def new_communicator_id(self) -> bytes:
        """An id with which two processes can join a new communicator; a secret between them.

        Raises:
            DeviceError: NCCL cannot use this host's network.
        """
        ...

    def join(self, communicator_id: bytes, rank: int) -> Communicator:
        """Join as rank 0 or 1, and wait for the other one, possibly forever.

        Raises:
            DeviceError: NCCL cannot connect the two.
        """
        ...
