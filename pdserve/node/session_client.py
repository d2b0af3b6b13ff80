"""The puller's end of the sessions: one per life of an exporter, opened when first needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio
import msgspec

from kv_transfer.handshake import KvIdentity
from kv_transfer.link import Link
from kv_transfer.puller import Puller
from pdserve.clock import Clock
from pdserve.config import Timeouts
from pdserve.errors import MalformedMessage, PdserveError, PeerLost, from_code
from pdserve.protocol import (
    Announcement,
    ExporterWelcome,
    HandoffEnded,
    HandoffRecord,
    NodeAddress,
    PullerHello,
    Settle,
    Subscribe,
)
from pdserve.wire.channel import open_channel
from pdserve.wire.envelopes import FROM_EXPORTER, FROM_PULLER
from pdserve.wire.outbox import Outbox, running
from pdserve.wire.session_pb2 import ExporterMessage, PullerMessage
from pdserve.wire.session_pb2_grpc import KvSessionStub

log = logging.getLogger(__name__)

Stream: TypeAlias = grpc.aio.StreamStreamCall[PullerMessage, ExporterMessage]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something an exporter said about a request, and when it was heard."""

    message: Announcement | HandoffRecord
    received_s: float


class _Inbox:
    """What has been said about one request and not been read yet."""

    def __init__(self) -> None:
        self.failed = asyncio.Event()
        self._failure: PdserveError | None = None
        self._notices: asyncio.Queue[Notice | None] = asyncio.Queue()  # None: look at the failure

    def put(self, notice: Notice) -> None:
        self._notices.put_nowait(notice)

    def fail(self, error: PdserveError) -> None:
        """Nothing more will come, for this reason."""
        self._failure = error
        self.failed.set()
        self._notices.put_nowait(None)

    async def get(self) -> Notice:
        """The next notice; raises the failure after the last one."""
        notice = await self._notices.get()
        if notice is None:
            self.raise_failure()
            raise AssertionError("an inbox ends with a failure")
        return notice

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class Session:
    """An open session: its link for pulling bytes, and the subscriptions over it."""

    def __init__(self, peer: NodeAddress, link: Link, outbox: Outbox, clock: Clock) -> None:
        self.peer = peer
        self.link = link
        self._outbox = outbox
        self._clock = clock
        self._inboxes: dict[str, _Inbox] = {}
        self._lost: PeerLost | None = None

    async def notices(self, request_id: str) -> AsyncGenerator[Notice]:
        """What the exporter says about a request, from its first block to its handoff record.

        Raises:
            PeerLost: the exporter is gone.
            PdserveError: the handoff ended, for the reason that the exporter gives.
        """
        if self._lost is not None:
            raise self._lost
        inbox = self._inboxes[request_id] = _Inbox()
        self._outbox.send(Subscribe(request_id=request_id))
        try:
            while True:
                yield await inbox.get()
        finally:
            self._inboxes.pop(request_id, None)

    async def wait(self, request_id: str, event: asyncio.Event) -> None:
        """Wait for `event`, but not beyond the end of the request's handoff.

        Raises:
            PeerLost: the exporter is gone.
            PdserveError: the handoff ended, for the reason that the exporter gives.
        """
        inbox = self._inboxes[request_id]
        waits = {asyncio.create_task(e.wait()) for e in (event, inbox.failed)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        inbox.raise_failure()

    def settle(self, request_id: str, *, was_pulled: bool) -> None:
        """Tell the exporter that the request's blocks are not needed any more."""
        self._outbox.send(Settle(request_id=request_id, pulled=was_pulled))

    def receive(self, message: msgspec.Struct) -> None:
        """Sort one message of the exporter; those about requests given up are dropped."""
        if not isinstance(message, Announcement | HandoffRecord | HandoffEnded):
            raise MalformedMessage(f"{type(message).__name__} in mid-session")
        inbox = self._inboxes.get(message.request_id)
        if inbox is None:
            return
        if isinstance(message, HandoffEnded):
            inbox.fail(from_code(message.code, message.message))
        else:
            inbox.put(Notice(message, self._clock.now()))

    def lose(self, error: PeerLost) -> None:
        """The session broke: everybody who waits on it is told."""
        self._lost = error
        for inbox in self._inboxes.values():
            inbox.fail(error)


class Sessions:
    """Sessions by exporter incarnation."""

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        identity: KvIdentity,
        puller: Puller,
        clock: Clock,
        timeouts: Timeouts,
    ) -> None:
        self._node_id = node_id
        self._incarnation = incarnation
        self._identity = identity
        self._puller = puller
        self._clock = clock
        self._timeouts = timeouts
        self._opening: dict[str, asyncio.Future[Session]] = {}  # incarnation |-> session
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, peer: NodeAddress) -> Session:
        """The session with this life of a node, opened if need be.

        Raises:
            PeerLost: it cannot be reached in time.
            LayoutMismatch, StaleIncarnation: the handshake was refused.
        """
        opening = self._opening.get(peer.incarnation)
        if opening is None:
            opening = self._opening[peer.incarnation] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._run(peer, opening))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(opening)

    async def close(self) -> None:
        """Hang up on everybody."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, peer: NodeAddress, opening: asyncio.Future[Session]) -> None:
        """Open a session and serve it until it breaks."""
        error: PdserveError = PeerLost(f"the session with {peer.node_id} was closed")
        try:
            await self._converse(peer, opening)
        except TimeoutError:
            error = PeerLost(f"{peer.node_id} did not answer within {self._timeouts.connect_s} s")
        except grpc.aio.AioRpcError as status:
            error = _error_of(peer, status)
        except PdserveError as refused:
            error = refused
        finally:
            del self._opening[peer.incarnation]
            if not opening.done():
                opening.set_exception(error)
                opening.exception()  # retrieved: nobody may be waiting any more
            elif not opening.cancelled():
                log.info("session with %s: %s", peer.node_id, error)
                lost = error if isinstance(error, PeerLost) else PeerLost(str(error))
                opening.result().lose(lost)

    async def _converse(self, peer: NodeAddress, opening: asyncio.Future[Session]) -> None:
        async with open_channel(peer.session_address, self._timeouts.liveness_s) as channel:
            stream = KvSessionStub(channel).Open()
            async with asyncio.timeout(self._timeouts.connect_s):
                await stream.write(FROM_PULLER.wrap(self._hello(peer)))
                welcome = await self._read(stream)
                if not isinstance(welcome, ExporterWelcome):
                    raise MalformedMessage(f"{type(welcome).__name__} instead of a welcome")
                link = await self._puller.connect(welcome, self._timeouts.connect_s)
            outbox = Outbox()
            session = Session(peer, link, outbox, self._clock)
            opening.set_result(session)
            try:
                async with running(outbox.pump(stream, FROM_PULLER)):
                    while True:
                        session.receive(await self._read(stream))
            finally:
                await link.close()

    def _hello(self, peer: NodeAddress) -> PullerHello:
        return PullerHello(
            node_id=self._node_id,
            incarnation=self._incarnation,
            exporter_incarnation=peer.incarnation,
            fingerprint=self._identity.fingerprint,
            layout=self._identity.layout,
        )

    async def _read(self, stream: Stream) -> msgspec.Struct:
        proto = await stream.read()
        if proto is grpc.aio.EOF:
            raise PeerLost("the exporter hung up")
        return FROM_EXPORTER.unwrap(proto)


def _error_of(peer: NodeAddress, status: grpc.aio.AioRpcError) -> PdserveError:
    for key, value in status.trailing_metadata() or ():
        if key == "pdserve-error-code":
            return from_code(str(value), status.details() or "")
    return PeerLost(f"lost {peer.node_id}: {status.code().name} {status.details()}")
