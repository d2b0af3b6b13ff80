"""One end of an NCCL communicator of two processes, with its thread and its staging memory.

    exporter   blocks --gather--> staging --send-->
                                                   --receive--> staging --scatter--> blocks   puller

The bytes of a pull go in chunks. There is room for two of them at each end, so one is on its way
while the next is gathered and the last is scattered.

NCCL cannot take back an operation, and one whose other end is stuck or dead waits for ever. So no
operation ever touches a block, only staging memory; a chunk is scattered after it has arrived, by
a copy that waits for nothing; and NCCL is called on a thread that may be left behind. So giving up
a pull is immediate: what NCCL still does with the staging memory is nobody's concern, and that
memory is given back only when NCCL has let go of it.
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
from kv_transfer.pieces import cut_chunks
from kv_transfer.plan import Spans
from kv_transfer.threads import CancelFlag, CopyThreads
from kv_transfer.transports.frames import GarbledFrame
from pdserve.errors import PeerLost

log = logging.getLogger(__name__)

T = TypeVar("T")

EXPORTER_RANK: Final = 0
PULLER_RANK: Final = 1
CHUNK_BYTES: Final = 8 << 20  # milliseconds on a slow link; many times what starting one costs
MAX_INVITATION_BYTES: Final = 1024
_MAX_CHUNK_BYTES = 64 << 20  # two of them are allocated on the exporter's word
_ID_BYTES = 128
_NUM_PLACES = 2
_END_S = 5.0


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """From the exporter, once a connection: join this communicator. The id is a secret."""

    communicator_id: bytes
    chunk_bytes: int

    def check(self) -> None:
        """Raises GarbledFrame: it cannot be one."""
        if len(self.communicator_id) != _ID_BYTES or not 0 < self.chunk_bytes <= _MAX_CHUNK_BYTES:
            raise GarbledFrame(
                f"received an invitation with an id of {len(self.communicator_id)} bytes and "
                f"chunks of {self.chunk_bytes}"
            )


class NcclPeer:
    """For one pull at a time; after a failure, for none. `Endings` see to its end."""

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
        """What the other end joins by.

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
        """Wait for the other end to join too, unless it is `gone`.

        Raises:
            PeerLost: it did not come in time, or NCCL cannot connect the two.
        """
        joining = self._calls.start(partial(self._join, communicator_id, rank))
        await _unless_gone(joining, gone, timeout_s)

    async def send(
        self, pool: Region, ranges: Spans, gone: asyncio.Future[None], stall_s: float
    ) -> None:
        """Send int64 [n, 2] (offset, nbytes) of the pool, one after the other.

        Raises:
            PeerLost: the other end is `gone`, takes nothing for `stall_s`, or NCCL or CUDA failed.
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
        """Receive into int64 [n, 2] (offset, nbytes) of the pool.

        When it has returned or raised, also by cancellation, nothing will write to the pool.

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
        """End it without waiting: what is under way is aborted. Idempotent."""
        if self._ending is None:
            aborter = LoneThread("kv-nccl-abort")
            self._ending = aborter.start(self._abort)
            aborter.close()

    async def end(self) -> None:
        """Abandon it, and wait a while for NCCL to let go of it."""
        self.abandon()
        assert self._ending is not None
        done, _ = await asyncio.wait({self._ending}, timeout=_END_S)
        if not done:
            # Its threads and its staging memory stay behind, as long as NCCL keeps them.
            log.warning("an NCCL communicator did not end within %g s: left behind", _END_S)
        elif error := self._ending.exception():
            log.warning("an NCCL communicator did not end well: %s", error)

    # ---- on other threads ----------------------------------------------------------------------

    def _join(self, communicator_id: bytes, rank: int) -> None:
        self._communicator = self._driver.join(communicator_id, rank)
        # Not before: whoever invites us and never joins costs a thread, and none of the GPU.
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
        """After the last call: nobody uses the staging memory any more."""
        try:
            if self._communicator is not None:
                self._communicator.abort()  # if it was joined after all; or else nothing happens
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
        """Where the chunk of this number is staged."""
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
    """Peers that are ending: whoever gives one up goes on at once, and is waited for at the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, peer: NcclPeer) -> None:
        """Give the peer up."""
        peer.abandon()
        task = asyncio.get_running_loop().create_task(peer.end())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Until all have ended, or are left behind."""
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _unless_gone(call: asyncio.Future[T], gone: asyncio.Future[None], timeout_s: float) -> T:
    """What the call gives. When this raises, the call may go on."""
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
