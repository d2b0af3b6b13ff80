"""Fake GPUs in host memory, for tests: copies can pause and fail, and NCCL can get stuck.

Everything happens on the thread that waits for it, as with the real driver. Addresses are real ones
of this process, so that address arithmetic is tested too.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from kv_transfer.cuda.driver import IPC_HANDLE_BYTES, MAX_PIECES, DeviceError, Region
from kv_transfer.spans.plan import Spans

_ID_BYTES = 128
_ALIGNMENT = 256


class FakeHost:
    """The state that the fake GPUs of one host share, and the controls for tests.

    What `errors` names fails. While copies do not flow, each copy hangs after its first piece.
    While sends do not flow, NCCL hangs at both ends; while aborts do not flow either, nothing can
    end that. While opens do not flow, opening the memory of others hangs.
    """

    def __init__(self) -> None:
        self.memory: dict[int, NDArray[np.uint8]] = {}  # address |-> a live allocation
        self.pinned: dict[int, NDArray[np.uint8]] = {}  # likewise, of memory that is the host's own
        self.most_pinned: float = inf  # bytes that can be pinned
        self.exported: dict[bytes, int] = {}  # handle |-> address
        self.num_opened = 0  # mappings that have not been closed
        self.batches_copies = True  # whether the drivers do
        self.launches: list[str] = []  # method of a lane, for each call that queued copies
        self.num_lanes = 0  # lanes that have not been closed
        self.num_communicators = 0  # communicators that were ever joined
        self.errors: dict[str, str] = {}  # method of a driver |-> what it raises
        self.handle_bytes = IPC_HANDLE_BYTES  # of what is exported
        self.is_opening = threading.Event()  # set by the first `open`
        self.abort_error = ""  # if not empty, aborts are done and then fail with this
        self.on_received: Callable[[], object] = lambda: None  # called at the end of each receive
        self.copy_error = ""  # if not empty, every copy fails with this
        self.pairs: dict[bytes, FakePair] = {}  # communicator id |-> its two ends
        self.changed = threading.Condition()
        self._ids = itertools.count()
        self._copies_flow = self._sends_flow = self._aborts_flow = self._opens_flow = True
        self._is_closed = False

    def driver(self, device: int = 0) -> FakeDriver:
        """The GPU with this ordinal, as one process sees it."""
        return FakeDriver(self, device)

    def let(
        self,
        *,
        copies: bool | None = None,
        sends: bool | None = None,
        aborts: bool | None = None,
        opens: bool | None = None,
    ) -> None:
        """Set what flows; None: unchanged."""
        with self.changed:
            self._copies_flow = self._copies_flow if copies is None else copies
            self._sends_flow = self._sends_flow if sends is None else sends
            self._aborts_flow = self._aborts_flow if aborts is None else aborts
            self._opens_flow = self._opens_flow if opens is None else opens
            self.changed.notify_all()

    def close(self) -> None:
        """Every waiting call raises an error."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()

    def new_pair(self) -> bytes:
        """The id of a new communicator."""
        communicator_id = next(self._ids).to_bytes(_ID_BYTES, "big")
        self.pairs[communicator_id] = FakePair()
        return communicator_id

    def holds(self, address: int, num_bytes: int) -> bool:
        """Whether this is memory of one live allocation."""
        return any(
            first <= address and address + num_bytes <= first + len(memory)
            for first, memory in (*self.memory.items(), *self.pinned.items())
        )

    def check(self, method: str) -> None:
        """Raises DeviceError: a test wants the method of drivers to fail."""
        if method in self.errors:
            raise DeviceError(self.errors[method])

    def wait_for_opens(self) -> None:
        """Wait until memory can be opened. Raises as wait_for_copies."""
        self.is_opening.set()
        self._wait(lambda: self._opens_flow)

    def wait_for_copies(self) -> None:
        """Wait until copies flow. Raises DeviceError: the host was closed."""
        self._wait(lambda: self._copies_flow)

    def wait_for_aborts(self) -> None:
        """Wait until aborts flow. Raises as wait_for_copies."""
        self._wait(lambda: self._aborts_flow)

    def wait_for_sends(self, pair: FakePair, rank: int, condition: Callable[[], bool]) -> None:
        """Wait until sends flow and the condition holds. Raises DeviceError: closed or aborted."""
        self._wait(lambda: rank in pair.aborted or (self._sends_flow and condition()))
        if rank in pair.aborted:
            raise DeviceError("the communicator was aborted")

    def wait_for_both(self, pair: FakePair) -> None:
        """Wait until both ends have joined. Raises as wait_for_copies."""
        self._wait(lambda: len(pair.joined) == 2)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self._is_closed or condition())
            if not condition():
                raise DeviceError("the fake host is closed")


@dataclass(slots=True, eq=False)
class FakePair:
    """The state of a communicator's two ends."""

    joined: set[int] = field(default_factory=set)  # ranks
    aborted: set[int] = field(default_factory=set)
    sent: bytes | None = None  # and not received yet


class FakeDriver:
    """Implements Driver."""

    def __init__(self, host: FakeHost, device: int) -> None:
        self.device = device
        self.bus_id = f"0000:{device:02x}:00.0"
        self._host = host

    @property
    def batches_copies(self) -> bool:
        """As Driver.batches_copies."""
        return self._host.batches_copies

    def allocate(self, num_bytes: int) -> int:
        """As Driver.allocate."""
        self._host.check("allocate")
        return _put(np.zeros(num_bytes + _ALIGNMENT, np.uint8), num_bytes, self._host.memory)

    def free(self, address: int) -> None:
        """As Driver.free."""
        del self._host.memory[address]

    def pin(self, num_bytes: int) -> int:
        """As Driver.pin. There is something in the memory."""
        pinned = self._host.pinned
        if sum(map(len, pinned.values())) + num_bytes > self._host.most_pinned:
            raise DeviceError(f"cannot pin {num_bytes} bytes: out of memory")
        return _put(np.full(num_bytes + _ALIGNMENT, 0xA5, np.uint8), num_bytes, pinned)

    def unpin(self, address: int) -> None:
        """As Driver.unpin."""
        del self._host.pinned[address]

    def export(self, address: int) -> bytes:
        """As Driver.export."""
        self._host.check("export")
        if address not in self._host.memory:
            raise DeviceError("not the address of an allocation")
        handle = address.to_bytes(self._host.handle_bytes, "big")
        self._host.exported[handle] = address
        return handle

    def open(self, handle: bytes) -> int:
        """As Driver.open."""
        self._host.check("open")
        self._host.wait_for_opens()
        address = self._host.exported.get(handle)
        if address is None or address not in self._host.memory:
            raise DeviceError("nothing was exported by this handle")
        self._host.num_opened += 1
        return address

    def close(self, address: int) -> None:
        """As Driver.close. What fails has closed it, too."""
        self._host.num_opened -= 1
        self._host.check("close")

    def open_lane(self) -> FakeLane:
        """As Driver.open_lane."""
        return FakeLane(self._host)

    def new_communicator_id(self) -> bytes:
        """As Driver.new_communicator_id."""
        return self._host.new_pair()

    def join(self, communicator_id: bytes, rank: int) -> FakeCommunicator:
        """As Driver.join."""
        pair = self._host.pairs.get(communicator_id)
        if pair is None:
            raise DeviceError("there is no communicator of this id")
        with self._host.changed:
            pair.joined.add(rank)
            self._host.changed.notify_all()
        self._host.wait_for_both(pair)
        return FakeCommunicator(self._host, pair, rank)


def _put(room: NDArray[np.uint8], num_bytes: int, allocations: dict[int, NDArray[np.uint8]]) -> int:
    """Put an allocation that is aligned within `room` among others; returns its address."""
    first = -room.ctypes.data % _ALIGNMENT
    address = room.ctypes.data + first
    allocations[address] = room[first : first + num_bytes]
    return address


class FakeLane:
    """Implements Lane; the copies are made in `finish`."""

    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._queue: list[tuple[int, int, int]] = []  # (destination, source, num_bytes)
        host.num_lanes += 1

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """As Lane.copy."""
        self._host.launches.append("copy")
        self._engine_copy(destination, source, num_bytes)

    def copy_batch(self, destination: int, source: int, spans: Spans) -> None:
        """As Lane.copy_batch."""
        assert self._host.batches_copies
        self._host.launches.append("copy_batch")
        for from_offset, to_offset, num_bytes in spans.tolist():
            assert num_bytes > 0
            self._engine_copy(destination + to_offset, source + from_offset, num_bytes)

    def copy_pieces(self, destination: int, source: int, pieces: Spans) -> None:
        """As Lane.copy_pieces."""
        assert len(pieces) <= MAX_PIECES
        self._host.launches.append("copy_pieces")
        for from_offset, to_offset, num_bytes in pieces.tolist():
            self._queue.append((destination + to_offset, source + from_offset, num_bytes))

    def finish(self) -> None:
        """As Lane.finish."""
        queue, self._queue = self._queue, []
        for destination, source, num_bytes in queue:
            if self._host.copy_error:
                raise DeviceError(self._host.copy_error)
            ctypes.memmove(destination, source, num_bytes)
            self._host.wait_for_copies()

    def close(self) -> None:
        """As Lane.close."""
        self._host.num_lanes -= 1

    def _engine_copy(self, destination: int, source: int, num_bytes: int) -> None:
        for address in (destination, source):
            if not self._host.holds(address, num_bytes):
                raise DeviceError("invalid argument")
        self._queue.append((destination, source, num_bytes))


class FakeCommunicator:
    """Implements Communicator. As with NCCL, an aborted receive may leave garbage in its region."""

    def __init__(self, host: FakeHost, pair: FakePair, rank: int) -> None:
        self._host = host
        self._pair = pair
        self._rank = rank
        host.num_communicators += 1

    def send(self, region: Region) -> None:
        """As Communicator.send."""
        pair = self._pair
        data = ctypes.string_at(region.address, region.num_bytes)
        self._host.wait_for_sends(pair, self._rank, lambda: pair.sent is None)
        self._put(data)

    def receive(self, region: Region) -> None:
        """As Communicator.receive."""
        pair = self._pair
        try:
            self._host.wait_for_sends(pair, self._rank, lambda: pair.sent is not None)
        except DeviceError:
            ctypes.memset(region.address, 0xAA, region.num_bytes)
            raise
        data = pair.sent or b""
        if len(data) != region.num_bytes:
            raise DeviceError(f"{len(data)} bytes were sent, {region.num_bytes} expected")
        ctypes.memmove(region.address, data, region.num_bytes)
        self._put(None)
        self._host.on_received()

    def abort(self) -> None:
        """As Communicator.abort."""
        self._host.wait_for_aborts()
        with self._host.changed:
            self._pair.aborted.add(self._rank)
            self._host.changed.notify_all()
        if self._host.abort_error:
            raise DeviceError(self._host.abort_error)

    def _put(self, data: bytes | None) -> None:
        with self._host.changed:
            self._pair.sent = data
            self._host.changed.notify_all()
