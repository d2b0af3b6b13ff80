"""The puller's end of sessions: one per incarnation of an exporter, opened when first needed."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, NoReturn, TypeAlias

import grpc.aio
import msgspec

from kv_transfer.handshake import KvIdentity
from kv_transfer.links.sharded_link import AnyLink
from kv_transfer.puller import Puller
from kv_transfer.spans.box import choose_shards
from pdserve.node.sessions.delayed import Delayed
from pdserve.node.sessions.subscription import Notice, Subscription
from pdserve.protocol import (
    Announcement,
    ExporterWelcome,
    HandoffEnded,
    HandoffRecord,
    LinkState,
    NodeAddress,
    Ping,
    Pong,
    PrefixAnswer,
    PrefixQuery,
    PullerHello,
    Settle,
    Subscribe,
)
from pdserve.protocol.version import PROTOCOL
from pdserve.settings.timeouts import NodeTimeouts
from pdserve.shared.clock import Clock
from pdserve.shared.errors import MalformedMessage, PdserveError, PeerLost, from_code
from pdserve.wire.channel import open_channel
from pdserve.wire.envelopes import FROM_EXPORTER, FROM_PULLER
from pdserve.wire.lifeline import called, lifeline
from pdserve.wire.outbox import Outbox, Sender, running
from pdserve.wire.patience import patience
from pdserve.wire.security import OPEN, Security
from pdserve.wire.session_pb2 import ExporterMessages, PullerMessages
from pdserve.wire.session_pb2_grpc import KvSessionStub

log = logging.getLogger(__name__)

PINGS: Final = 2.0  # intervals of pings without any acknowledgement, after which a way is cut

Stream: TypeAlias = grpc.aio.StreamStreamCall[PullerMessages, ExporterMessages]
Receive: TypeAlias = Callable[[msgspec.Struct], None]


class Session:
    """An open session: the link for pulling bytes, and the subscriptions and queries over it."""

    def __init__(self, peer: NodeAddress, link: AnyLink, outbox: Sender, clock: Clock) -> None:
        self.peer = peer
        self.link = link
        self._outbox = outbox
        self._clock = clock
        self._subscriptions: dict[str, Subscription] = {}  # by id
        self._answers: dict[str, asyncio.Future[PrefixAnswer]] = {}  # by query id
        self._lost: PeerLost | None = None

    @asynccontextmanager
    async def subscribed(
        self, request_id: str, *, at_end: bool = False, num_emitted: int = 0, taker: str = ""
    ) -> AsyncIterator[Subscription]:
        """Subscribe to a request's handoff; it is settled when the context ends.

        With `at_end`, nothing is announced until all of it can be pulled. With `num_emitted`, it is
        a stream that runs there, so many of its output tokens are known here, and the leg `taker`
        is to go on with it.

        Raises:
            PeerLost: the exporter is gone.
        """
        if self._lost is not None:
            raise self._lost
        subscription_id = secrets.token_hex(8)
        subscription = Subscription(subscription_id, self._outbox.send)
        self._subscriptions[subscription_id] = subscription
        self._outbox.send(
            Subscribe(
                request_id=request_id,
                subscription_id=subscription_id,
                at_end=at_end,
                num_emitted=num_emitted,
                taker=taker,
            )
        )
        try:
            yield subscription
        finally:
            del self._subscriptions[subscription_id]
            self.settle(subscription_id, was_pulled=subscription.was_pulled)

    @asynccontextmanager
    async def prefix(
        self, first_block: int, hashes: Sequence[bytes]
    ) -> AsyncIterator[PrefixAnswer]:
        """Ask for these blocks of a prompt; the exporter holds what it has while the context lasts.

        Raises:
            PeerLost: the exporter is gone.
        """
        if self._lost is not None:
            raise self._lost
        query = PrefixQuery(
            query_id=secrets.token_hex(8), first_block=first_block, hashes=list(hashes)
        )
        answer = asyncio.get_running_loop().create_future()
        self._answers[query.query_id] = answer
        self._outbox.send(query)
        was_pulled = False
        try:
            yield await answer
            was_pulled = True
        finally:
            del self._answers[query.query_id]
            self.settle(query.query_id, was_pulled=was_pulled)

    def settle(self, subscription_id: str, *, was_pulled: bool) -> None:
        """Tell the exporter that the blocks of a subscription or query are not needed any more."""
        self._outbox.send(Settle(subscription_id=subscription_id, pulled=was_pulled))

    def receive(self, message: msgspec.Struct) -> None:
        """Dispatch a message of the exporter; for a subscription that has ended it is dropped."""
        if isinstance(message, PrefixAnswer):
            answer = self._answers.get(message.query_id)
            if answer is not None and not answer.done():
                answer.set_result(message)
            return
        if not isinstance(message, Announcement | HandoffRecord | HandoffEnded):
            name = type(message).__name__
            raise MalformedMessage(f"an exporter cannot send {name} after its welcome")
        subscription = self._subscriptions.get(message.subscription_id)
        if subscription is None:
            return
        if isinstance(message, HandoffEnded):
            subscription.fail(from_code(message.code, message.message))
        else:
            subscription.put(Notice(message, self._clock.now()))

    def lose(self, error: PeerLost) -> None:
        """The session broke: all subscriptions and queries fail with this error."""
        self._lost = error
        for subscription in self._subscriptions.values():
            subscription.fail(error)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)


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
        self._node_id = node_id
        self._incarnation = incarnation
        self._identity = identity
        self._puller = puller
        self._clock = clock
        self._timeouts = timeouts
        self._security = security
        self._opening: dict[str, asyncio.Future[Session]] = {}  # incarnation |-> session
        self._failed: dict[str, float] = {}  # incarnation |-> time, of the last `liveness_s`
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
        """Whether opening a session with this incarnation of a node has failed recently."""
        failed_s = self._failed.get(peer.incarnation)
        return failed_s is not None and self._clock.now() < failed_s + self._timeouts.liveness_s

    def links(self) -> list[LinkState]:
        """How KV is pulled over each open session, sorted by the exporter's name."""
        sessions = map(_opened, self._opening.values())
        states = [
            LinkState(
                peer=session.peer.node_id,
                transport=session.link.transport,
                reason=session.link.reason,
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
        except Exception as unexpected:  # a bug; those who wait for the session must be told
            log.exception("the session with %s failed", peer.node_id)
            error = PeerLost(f"the session with {peer.node_id} failed: {unexpected!r}")
        finally:
            del self._opening[peer.incarnation]
            if not opening.done():
                self._remember_failure(peer)
                opening.set_exception(error)
                opening.exception()  # marks it as retrieved, in case nobody waits any more
            elif not opening.cancelled():
                log.info("session with %s: %s", peer.node_id, error)
                lost = error if isinstance(error, PeerLost) else PeerLost(str(error))
                opening.result().lose(lost)

    async def _converse(self, peer: NodeAddress, opening: asyncio.Future[Session]) -> None:
        liveness_s, security = self._timeouts.liveness_s, self._security
        async with open_channel(peer.session_address, liveness_s, security) as channel:
            stream = KvSessionStub(channel).Open(metadata=security.metadata)
            async with patience(self._timeouts.connect_s):
                await stream.write(FROM_PULLER.wrap(self._hello(peer)))
                welcome = FROM_EXPORTER.unwrap(await self._read(stream))
                if not isinstance(welcome, ExporterWelcome):
                    raise MalformedMessage(
                        f"an exporter sends ExporterWelcome first, not {type(welcome).__name__}"
                    )
                # A pull takes what both sides have: one exporter must have all of our heads.
                choose_shards([welcome.layout], self._identity.layout)
                link = await self._puller.connect(welcome, self._timeouts.connect_s)
            outbox = Outbox()
            delay_s = link.simulated.delay if link.simulated is not None else 0.0
            sender = Delayed(outbox.send, delay_s) if delay_s else outbox
            session = Session(peer, link, sender, self._clock)
            receive = Delayed(session.receive, delay_s).send if delay_s else session.receive
            self._failed.pop(peer.incarnation, None)
            opening.set_result(session)
            try:
                async with running(outbox.pump(stream, FROM_PULLER)):
                    if welcome.answers_pings:
                        await self._hear_in_time(peer, stream, outbox, receive)
                    await self._hear(stream, receive)
            finally:
                await link.close()

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
        try:
            with lifeline(liveness_s, exporter, answers_s) as line:
                waiting = patience(answers_s, waits_on=line.holds)
                async with running(self._ping(outbox)), waiting as silence:
                    await self._hear(stream, receive, silence.heard)
        except TimeoutError as error:
            raise PeerLost(f"{peer.node_id} was silent for {liveness_s:g} s") from error

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

    def _remember_failure(self, peer: NodeAddress) -> None:
        now_s = self._clock.now()
        first_s = now_s - self._timeouts.liveness_s
        self._failed = {i: failed_s for i, failed_s in self._failed.items() if failed_s > first_s}
        self._failed[peer.incarnation] = now_s

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


def _error_of(peer: NodeAddress, status: grpc.aio.AioRpcError) -> PdserveError:
    for key, value in status.trailing_metadata() or ():
        if key == "pdserve-error-code":
            return from_code(str(value), status.details() or "")
    return PeerLost(f"lost {peer.node_id}: {status.code().name} {status.details()}")
