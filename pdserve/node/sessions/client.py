"""The puller's end of sessions: one per incarnation of an exporter, opened when first needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NoReturn, TypeAlias

import grpc.aio
import msgspec

from kv_transfer.handshake import KvIdentity
from kv_transfer.links.sharded_link import AnyLink
from kv_transfer.puller import Puller
from kv_transfer.spans.box import choose_shards
from pdserve.node.sessions.delayed import Delayed
from pdserve.node.sessions.session import Session
from pdserve.node.sessions.unreached import Unreached
from pdserve.protocol import (
    ExporterWelcome,
    LinkState,
    NodeAddress,
    Ping,
    Pong,
    PullerHello,
)
from pdserve.protocol.version import PROTOCOL
from pdserve.settings.timeouts import NodeTimeouts
from pdserve.shared.clock import Clock
from pdserve.shared.errors import MalformedMessage, PdserveError, PeerLost, from_code
from pdserve.wire.channel import open_channel
from pdserve.wire.envelopes import FROM_EXPORTER, FROM_PULLER
from pdserve.wire.lifeline import Lifeline, called, lifeline
from pdserve.wire.outbox import Outbox, running
from pdserve.wire.patience import Patience, patience
from pdserve.wire.security import OPEN, Security
from pdserve.wire.session_pb2 import ExporterMessages, PullerMessages
from pdserve.wire.session_pb2_grpc import KvSessionStub

log = logging.getLogger(__name__)

PINGS: Final = 2.0  # intervals of pings without any acknowledgement, after which a way is cut

Stream: TypeAlias = grpc.aio.StreamStreamCall[PullerMessages, ExporterMessages]
Receive: TypeAlias = Callable[[msgspec.Struct], None]


class _Silent(PeerLost):
    """Nothing broke: it does not answer."""


class Sessions:
    """All sessions of a puller, by exporter incarnation."""

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        identity: KvIdentity,
        puller: Puller,
        clock: Clock,
        timeouts: NodeTimeouts,
        security: Security = OPEN,
    ) -> None:
        """Nothing is opened yet."""
        self.on_silent: Callable[[], None] = lambda: None  # called once such a session has gone
        self._node_id = node_id
        self._incarnation = incarnation
        self._identity = identity
        self._puller = puller
        self._clock = clock
        self._timeouts = timeouts
        self._security = security
        self._opening: dict[str, asyncio.Future[Session]] = {}  # incarnation |-> session
        self._unreached = Unreached(clock, timeouts.liveness_s)
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, peer: NodeAddress) -> Session:
        """The session with this incarnation of a node, opened if necessary.

        Raises:
            PeerLost: it cannot be reached in time.
            LayoutMismatch, StaleIncarnation: the handshake was refused, or it lacks KV heads.
        """
        opening = self._opening.get(peer.incarnation)
        if opening is None:
            opening = self._opening[peer.incarnation] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._run(peer, opening))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(opening)

    def opened(self, peer: NodeAddress) -> Session | None:
        """The session with this incarnation of a node, if it is open already."""
        opening = self._opening.get(peer.incarnation)
        return _opened(opening) if opening is not None else None

    def has_failed(self, peer: NodeAddress) -> bool:
        """Whether who can do without this incarnation of a node should: see `Unreached`."""
        opening = self._opening.get(peer.incarnation)
        is_tried = opening is not None and not opening.done()
        return self._unreached.leaves_alone(peer.incarnation, is_tried=is_tried)

    def links(self) -> list[LinkState]:
        """How KV is pulled over each open session, sorted by the exporter's name."""
        sessions = map(_opened, self._opening.values())
        states = [
            LinkState(
                peer=session.peer.node_id,
                transport=session.link.transport,
                reason=session.link.reason,
                codec=session.link.codec,
            )
            for session in sessions
            if session is not None
        ]
        return sorted(states, key=lambda state: state.peer)

    async def close(self) -> None:
        """Close all sessions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for opening in self._opening.values():  # its task was cancelled before it began
            opening.set_exception(PeerLost("the sessions are closed"))
            opening.exception()  # marks it as retrieved, in case nobody waits any more
        self._opening.clear()

    async def _run(self, peer: NodeAddress, opening: asyncio.Future[Session]) -> None:
        """Open a session and serve it until it breaks."""
        error: PdserveError = PeerLost(f"the session with {peer.node_id} was closed")
        try:
            await self._converse(peer, opening)
        except grpc.aio.AioRpcError as status:
            error = _error_of(peer, status)
        except PdserveError as refused:
            error = refused
        except Exception as unexpected:  # a bug; those who wait for the session must be told
            log.exception("the session with %s failed", peer.node_id)
            error = PeerLost(f"the session with {peer.node_id} failed: {unexpected!r}")
        finally:
            del self._opening[peer.incarnation]
            self._unreached.failed(peer.incarnation)
            if not opening.done():
                opening.set_exception(error)
                opening.exception()  # marks it as retrieved, in case nobody waits any more
            elif not opening.cancelled():
                log.info("session with %s: %s", peer.node_id, error)
                lost = error if isinstance(error, PeerLost) else PeerLost(str(error))
                opening.result().lose(lost)
                if isinstance(error, _Silent):
                    self.on_silent()

    async def _converse(self, peer: NodeAddress, opening: asyncio.Future[Session]) -> None:
        liveness_s, security = self._timeouts.liveness_s, self._security
        async with open_channel(peer.session_address, liveness_s, security) as channel:
            stream = KvSessionStub(channel).Open(metadata=security.metadata)
            welcome, link = await self._welcomed(peer, stream)
            outbox = Outbox()
            delay_s = link.simulated.delay if link.simulated is not None else 0.0
            sender = Delayed(outbox.send, delay_s) if delay_s else outbox
            session = Session(peer, link, sender, self._clock)
            receive = Delayed(session.receive, delay_s).send if delay_s else session.receive
            self._unreached.reached(peer.incarnation)
            opening.set_result(session)
            try:
                async with running(outbox.pump(stream, FROM_PULLER)):
                    if welcome.answers_pings:
                        await self._hear_in_time(peer, stream, outbox, receive)
                    await self._hear(stream, receive)
            finally:
                await link.close()

    async def _welcomed(self, peer: NodeAddress, stream: Stream) -> tuple[ExporterWelcome, AnyLink]:
        """Open a session: within `connect_s`, and `liveness_s` if there is no sign of the host.

        Raises:
            PeerLost: it did not answer in time.
            PdserveError: it is no exporter for this puller.
        """
        connect_s = self._timeouts.connect_s
        first_s = min(connect_s, self._timeouts.liveness_s)
        exporter = await called(peer.session_address)
        with lifeline(first_s, exporter, is_opening=True) as line:

            def waits_on(silent_s: float) -> bool:
                return silent_s < connect_s and line.holds(min(silent_s, first_s))

            try:
                # The first look is halfway: by the second half the host has had time to answer it.
                async with patience(first_s / 2, waits_on=waits_on) as silence:
                    await stream.write(FROM_PULLER.wrap(self._hello(peer)))
                    welcome = FROM_EXPORTER.unwrap(await self._read(stream))
                    if not isinstance(welcome, ExporterWelcome):
                        raise MalformedMessage(
                            f"an exporter sends ExporterWelcome first, not {type(welcome).__name__}"
                        )
                    # A pull takes what both sides have: one exporter must have all of our heads.
                    choose_shards([welcome.layout], self._identity.layout)
                    return welcome, await self._puller.connect(welcome, connect_s)
            except TimeoutError as error:
                raise _gone(peer, silence, line) from error

    async def _hear_in_time(
        self, peer: NodeAddress, stream: Stream, outbox: Outbox, receive: Receive
    ) -> NoReturn:
        """As `_hear`, but an exporter that does not answer pings counts as lost.

        What waits for it would wait until gRPC notices, and a stream with it. Where not even its
        kernel answers, two pings are enough: others are sent to other pairs then.
        """
        liveness_s = self._timeouts.liveness_s
        answers_s = min(liveness_s, PINGS * self._timeouts.heartbeat_s)
        exporter = await called(peer.session_address)
        with lifeline(liveness_s, exporter, answers_s) as line:
            waiting = patience(answers_s, waits_on=line.holds)
            try:
                async with running(self._ping(outbox)), waiting as silence:
                    await self._hear(stream, receive, silence.heard)
            except TimeoutError as error:
                raise _gone(peer, silence, line) from error

    async def _ping(self, outbox: Outbox) -> None:
        while True:
            outbox.send(Ping())
            await asyncio.sleep(self._timeouts.heartbeat_s)

    async def _hear(
        self, stream: Stream, receive: Receive, on_heard: Callable[[], None] = lambda: None
    ) -> NoReturn:
        """Pass on what the exporter says, until the session breaks. Raises what broke it."""
        while True:
            messages = FROM_EXPORTER.unwrap_all(await self._read(stream))
            on_heard()
            for message in messages:
                if not isinstance(message, Pong):
                    receive(message)

    def _hello(self, peer: NodeAddress) -> PullerHello:
        return PullerHello(
            node_id=self._node_id,
            incarnation=self._incarnation,
            exporter_incarnation=peer.incarnation,
            fingerprint=self._identity.fingerprint,
            layout=self._identity.layout,
            introduction=peer.introduction,
            protocol=PROTOCOL,
        )

    async def _read(self, stream: Stream) -> ExporterMessages:
        proto: ExporterMessages = await stream.read()
        if proto is grpc.aio.EOF:
            raise PeerLost("the exporter hung up")
        return proto


def _opened(opening: asyncio.Future[Session]) -> Session | None:
    """The session, if opening it has succeeded."""
    if not opening.done() or opening.cancelled() or opening.exception() is not None:
        return None
    return opening.result()


def _gone(peer: NodeAddress, silence: Patience, line: Lifeline) -> _Silent:
    return _Silent(
        f"{peer.node_id} did not answer for {silence.silent_s:.1f} s{line.of_its_host()}"
    )


def _error_of(peer: NodeAddress, status: grpc.aio.AioRpcError) -> PdserveError:
    for key, value in status.trailing_metadata() or ():
        if key == "pdserve-error-code":
            return from_code(str(value), status.details() or "")
    return PeerLost(f"lost {peer.node_id}: {status.code().name} {status.details()}")
