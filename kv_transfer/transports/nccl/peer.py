"""One end of an NCCL communicator of two processes, with its thread and its staging memory.

    exporter   blocks --gather--> staging --send-->
                                                   --receive--> staging --scatter--> blocks   puller

The bytes of a pull are sent in chunks. Each end has room for two, so one is in transit while
the next one is gathered and the last one is scattered.

NCCL cannot cancel an operation, and one whose other end hangs or has died waits forever. So NCCL
only accesses staging memory, never blocks: a chunk is scattered after it has arrived, by a copy
that waits for nothing. And NCCL is called on a thread that can be left behind. So a pull can be
abandoned at once: whatever NCCL still does with the staging memory does not matter, and the memory
is freed only when NCCL has released it.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from kv_transfer.cuda.copier import SpanCopier
from kv_transfer.cuda.driver import Communicator, DeviceError, Driver, Region
from kv_transfer.lone_thread import LoneThread
from kv_transfer.spans.pieces import cut_chunks
from kv_transfer.spans.plan import Spans
from kv_transfer.threads import CancelFlag, CopyThreads
from kv_transfer.transports.frames import GarbledFrame
from pdserve.shared.errors import PeerLost

log = logging.getLogger(__name__)

T = TypeVar("T")

EXPORTER_RANK: Final = 0
PULLER_RANK: Final = 1
CHUNK_BYTES: Final = 8 << 20  # a few milliseconds on a slow link; large beside the cost of a call
MAX_INVITATION_BYTES: Final = 1024
_MAX_CHUNK_BYTES = 64 << 20  # the exporter chooses the size, and we allocate two chunks
_ID_BYTES = 128
_NUM_PLACES = 2
_END_S = 5.0  # how long NCCL may take to release a communicator


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Sent by the exporter, once per connection: join this communicator. The id is a secret."""

    communicator_id: bytes
    chunk_bytes: int

    def check(self) -> None:
        """Raises GarbledFrame: a field is invalid."""
        if len(self.communicator_id) != _ID_BYTES or not 0 < self.chunk_bytes <= _MAX_CHUNK_BYTES:
            raise GarbledFrame(
                f"received an invitation with an id of {len(self.communicator_id)} bytes and "
                f"chunks of {self.chunk_bytes}"
            )


class NcclPeer:
    """Serves one pull at a time, and none after a failure. It is ended by `Endings`."""

    def __init__(
        self, driver: Driver, copier: SpanCopier, threads: CopyThreads, chunk_bytes: int
    ) -> None:
        self._driver = driver
        self._copier = copier
        self._threads = threads
        self._chunk_bytes = chunk_bytes
        self._calls = LoneThread("kv-nccl")
        self._communicator: Communicator | None = None  # once joined
        self._staging: int | None = None  # the address of _NUM_PLACES chunks
        self._ending: asyncio.Future[None] | None = None

    async def invite(self) -> Invitation:
        """Create an invitation for the other end.

        Raises:
            PeerLost: NCCL does not work here.
        """
        try:
            communicator_id = await self._calls.start(self._driver.new_communicator_id)
        except DeviceError as error:
            raise PeerLost(str(error)) from error
        return Invitation(communicator_id, self._chunk_bytes)

    async def join(
        self, communicator_id: bytes, rank: int, gone: asyncio.Future[None], timeout_s: float
    ) -> None:
        """Join, and wait for the other end, unless it is `gone`.

        Raises:
            PeerLost: it did not join in time, or NCCL cannot connect the two.
        """
        joining = self._calls.start(partial(self._join, communicator_id, rank))
        await _unless_gone(joining, gone, timeout_s)

    async def send(
        self, pool: Region, ranges: Spans, gone: asyncio.Future[None], stall_s: float
    ) -> None:
        """Send ranges of the pool in order: int64 [n, 2] (offset, nbytes).

        Raises:
            PeerLost: the other end is `gone` or stalls for `stall_s`, or NCCL or CUDA failed.
        """
        sending: asyncio.Future[None] | None = None
        for number, chunk in enumerate(await self._cut(ranges)):
            place = self._place(number, chunk)
            await self._copy(place, pool, chunk)
            if sending is not None:
                await _unless_gone(sending, gone, stall_s)
            sending = self._calls.start(partial(self._joined.send, place))
        if sending is not None:
            await _unless_gone(sending, gone, stall_s)

    async def receive(
        self, pool: Region, ranges: Spans, gone: asyncio.Future[None], stall_s: float
    ) -> None:
        """Receive into ranges of the pool in order: int64 [n, 2] (offset, nbytes).

        Once it has returned or raised, also by cancellation, nothing writes to the pool.

        Raises:
            PeerLost: as `send`.
        """
        chunks = await self._cut(ranges)
        receiving = self._start_receiving(0, chunks)
        for number, chunk in enumerate(chunks):
            if receiving is not None:
                await _unless_gone(receiving, gone, stall_s)
            receiving = self._start_receiving(number + 1, chunks)
            await self._copy(pool, self._place(number, chunk), chunk[:, [1, 0, 2]])

    def abandon(self) -> None:
        """Start to end the peer, aborting what is in progress; does not wait. Idempotent."""
        if self._ending is None:
            aborter = LoneThread("kv-nccl-abort")
            self._ending = aborter.start(self._abort)
            aborter.close()

    async def end(self, end_s: float) -> None:
        """Abandon the peer, and wait `end_s` for NCCL to release it."""
        self.abandon()
        assert self._ending is not None
        done, _ = await asyncio.wait({self._ending}, timeout=end_s)
        if not done:
            # Its threads and staging memory are leaked for as long as NCCL keeps them.
            log.warning("an NCCL communicator did not end within %g s: left behind", end_s)
        elif error := self._ending.exception():
            log.warning("an NCCL communicator did not end well: %s", error)

    # ---- on other threads ----------------------------------------------------------------------

    def _join(self, communicator_id: bytes, rank: int) -> None:
        self._communicator = self._driver.join(communicator_id, rank)
        # Only now: an exporter that invites us but never joins must not cost GPU memory.
        self._staging = self._driver.allocate(_NUM_PLACES * self._chunk_bytes)

    def _abort(self) -> None:
        try:
            if self._communicator is not None:
                self._communicator.abort()  # ends what the calling thread waits for
        finally:
            disposal = self._calls.submit(self._dispose)
            self._calls.close()
            disposal.result()

    def _dispose(self) -> None:
        """Runs after the last call, when nothing uses the staging memory any more."""
        try:
            if self._communicator is not None:
                self._communicator.abort()  # idempotent; it may have been joined after the first
        finally:
            if self._staging is not None:
                self._driver.free(self._staging)

    # ---- parts ---------------------------------------------------------------------------------

    @property
    def _joined(self) -> Communicator:
        assert self._communicator is not None, "not joined"
        return self._communicator

    async def _cut(self, ranges: Spans) -> list[Spans]:
        return await self._threads.run(partial(cut_chunks, ranges, self._chunk_bytes), CancelFlag())

    def _place(self, number: int, chunk: Spans) -> Region:
        """The staging memory for the chunk with this number."""
        assert self._staging is not None, "not joined"
        address = self._staging + number % _NUM_PLACES * self._chunk_bytes
        return Region(address, int(chunk[:, 2].sum()))

    def _start_receiving(self, number: int, chunks: list[Spans]) -> asyncio.Future[None] | None:
        if number == len(chunks):
            return None
        place = self._place(number, chunks[number])
        return self._calls.start(partial(self._joined.receive, place))

    async def _copy(self, destination: Region, source: Region, spans: Spans) -> None:
        cancel = CancelFlag()
        copy = partial(self._copier.copy, destination, source, spans, cancel)
        try:
            await self._threads.run(copy, cancel)
        except DeviceError as error:
            raise PeerLost(f"a copy on our own GPU failed: {error}") from error


class Endings:
    """Peers that are being ended in the background; `wait` waits for all of them."""

    def __init__(self, end_s: float = _END_S) -> None:
        self._end_s = end_s
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, peer: NcclPeer) -> None:
        """Abandon a peer."""
        peer.abandon()
        task = asyncio.get_running_loop().create_task(peer.end(self._end_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Wait until all have ended, or are left behind."""
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _unless_gone(call: asyncio.Future[T], gone: asyncio.Future[None], timeout_s: float) -> T:
    """The result of the call. If this raises, the call may still be running."""
    either: set[asyncio.Future[Any]] = {call, gone}
    await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if call.done():
        try:
            return call.result()
        except DeviceError as error:
            raise PeerLost(f"NCCL failed: {error}") from error
    if gone.done():
        raise PeerLost("the other end has hung up")
    raise PeerLost(f"the other end did nothing for {timeout_s} s")
