"""The seam to CUDA: the few things that the KV transfer needs of a GPU.

`cupy_driver.py` is the real thing, imported when it is asked for and not before; `fake.py` is one
over host memory, for tests. Every method can be called from any thread; those that wait say so, and
are never called on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from kv_transfer.plan import Spans
from pdserve.errors import TransferError, TransportUnavailable

MAX_PIECES: Final = 1 << 16  # of one `Lane.copy_pieces`
IPC_HANDLE_BYTES: Final = 64  # CUDA_IPC_HANDLE_SIZE

_INSTALL = "pip install 'pdserve[cuda]'"


class DeviceError(TransferError):
    """CUDA or NCCL reported an error."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of a GPU, by its address in this process."""

    address: int
    num_bytes: int


class Lane(Protocol):
    """A stream of its own: its copies wait for no other work, and no other work waits for them.

    Of one thread at a time.
    """

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Queue one copy between two addresses, by a copy engine.

        Raises:
            DeviceError: it cannot be queued, or an address is of no memory that CUDA knows.
        """
        ...

    def copy_pieces(self, destination: int, source: int, pieces: Spans) -> None:
        """Queue many copies as one kernel.

        `pieces` is int64 [n <= MAX_PIECES, 3]: (source offset, destination offset, nbytes), not
        checked against anything here; a warp of 32 threads copies each.

        Raises:
            DeviceError: they cannot be queued.
        """
        ...

    def finish(self) -> None:
        """Wait until nothing that was queued is still to be done.

        Raises:
            DeviceError: some of it failed. Nothing of it goes on.
        """
        ...

    def close(self) -> None:
        """Let go of it; it is finished."""
        ...


class Communicator(Protocol):
    """NCCL between two processes. `send` and `receive` are one thread's, `abort` is anybody's."""

    def send(self, region: Region) -> None:
        """Wait until the other end has these bytes, or will have them without us.

        Raises:
            DeviceError: NCCL failed, or the communicator was aborted.
        """
        ...

    def receive(self, region: Region) -> None:
        """Wait until the other end's next `send`, of just as many bytes, has filled the region.

        Raises:
            DeviceError: as `send`; the region may be written to until `abort` has returned.
        """
        ...

    def abort(self) -> None:
        """End what is waiting, and the communicator. Local; may itself wait, even for ever.

        Raises:
            DeviceError: NCCL failed.
        """
        ...


class Driver(Protocol):
    """One GPU as seen by one process."""

    @property
    def device(self) -> int:
        """Its ordinal in this process."""
        ...

    @property
    def bus_id(self) -> str:
        """Its PCI address, by which NCCL too tells the GPUs of a host apart."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """A new allocation, all zeros: its address.

        Raises:
            DeviceError: there is no such room.
        """
        ...

    def free(self, address: int) -> None:
        """Give an allocation back. May wait for all work on the device."""
        ...

    def export(self, address: int) -> bytes:
        """The handle, IPC_HANDLE_BYTES, by which another process on this host can open it.

        Raises:
            DeviceError: CUDA IPC does not work here.
        """
        ...

    def open(self, handle: bytes) -> int:
        """The address in this process of what another one has exported.

        Raises:
            DeviceError: no such allocation, or no way from this GPU to that one.
        """
        ...

    def close(self, address: int) -> None:
        """Let go of what was opened; nothing reads it any more."""
        ...

    def open_lane(self) -> Lane:
        """Raises DeviceError: no memory for one."""
        ...

    def new_communicator_id(self) -> bytes:
        """What both ends of a new communicator need; a secret between them.

        Raises:
            DeviceError: NCCL cannot use this host's network.
        """
        ...

    def join(self, communicator_id: bytes, rank: int) -> Communicator:
        """Wait for the other end to join as well, perhaps for ever. The ranks are 0 and 1.

        Raises:
            DeviceError: NCCL cannot connect the two.
        """
        ...


def missing() -> str | None:
    """What this process lacks to use a GPU's memory through CUDA; None: nothing."""
    try:
        from kv_transfer.cuda import cupy_driver
    except ImportError as error:
        return f"{error}: {_INSTALL}"
    return cupy_driver.no_device()


def nccl_missing() -> str | None:
    """What this process lacks for NCCL; None: nothing."""
    lacking = missing()
    if lacking is not None:
        return lacking
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return f"{error}: {_INSTALL}"
    # Where the library is not found, cupy has a placeholder instead of the module.
    return None if nccl.available else f"the NCCL library is not found: {_INSTALL}"


def open_driver(device: int) -> Driver:
    """The GPU of this ordinal.

    Raises:
        TransportUnavailable: something is missing; says what.
        DeviceError: CUDA failed.
    """
    lacking = missing()
    if lacking is not None:
        raise TransportUnavailable(lacking)
    from kv_transfer.cuda import cupy_driver

    return cupy_driver.CupyDriver(device)
