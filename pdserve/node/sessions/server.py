"""The exporter's end of sessions: other nodes connect and are told what they can pull."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

import grpc.aio
import msgspec
from google.protobuf.message import DecodeError
from msgspec.structs import replace

from kv_transfer.exporter import Exporter
from pdserve.node.prefixes.exports import PrefixExports, PrefixHolds
from pdserve.protocol import (
    Announcement,
    ExporterWelcome,
    HandoffEnded,
    HandoffRecord,
    Ping,
    Pong,
    PrefixQuery,
    PullerHello,
    Renew,
    Settle,
    Subscribe,
    TakeOver,
)
from pdserve.shared.clock import Clock
from pdserve.shared.errors import MalformedMessage, PdserveError, PeerLost
from pdserve.wire import session_pb2_grpc
from pdserve.wire.envelopes import FROM_EXPORTER, FROM_PULLER
from pdserve.wire.outbox import Outbox, running
from pdserve.wire.patience import patience
from pdserve.wire.session_pb2 import ExporterMessages, PullerMessages

log = logging.getLogger(__name__)

HandoffMessage: TypeAlias = Announcement | HandoffRecord | HandoffEnded
Subscriber: TypeAlias = Callable[[HandoffMessage], None]
Context: TypeAlias = grpc.aio.ServicerContext[PullerMessages, ExporterMessages]


class Announcer(Protocol):
    """Announces which KV of which request can be pulled (`prefill_node.handoffs`)."""

    def subscribe(self, request_id: str, subscriber: Subscriber, *, at_end: bool = False) -> None:
        """Send all announcements of a request to `subscriber`: the past ones, then new ones.

        With `at_end`, they are sent together with the handoff record. The request may be unknown
        so far.
        """
        ...

    def subscribe_to_stream(
        self, request_id: str, subscriber: Subscriber, num_emitted: int, taker: str
    ) -> None:
        """Send announcements of what a stream that runs here has completed, and one without ticket.

        The subscriber is about to take the stream over, as the leg `taker`, and knows `num_emitted`
        of its tokens. It replaces one with an earlier leg, which is told so, or is told that there
        is one with a later leg. Where a build does not name its leg, the later to come has it.
        """
        ...

    def take_over(self, request_id: str, subscriber: Subscriber) -> None:
        """The subscriber has pulled all: send what is new, or end the stream (`TakeOver`)."""
        ...

    def unsubscribe(self, request_id: str, subscriber: Subscriber) -> None:
        """The subscriber has left without settling; another one may come."""
        ...

    def renew(self, request_id: str, subscriber: Subscriber) -> None:
        """Send all past announcements again, with fresh tickets."""
        ...

    def settle(self, request_id: str, subscriber: Subscriber, *, was_pulled: bool) -> None:
        """The subscriber does not need the blocks any more."""
        ...


class SessionServer(session_pb2_grpc.KvSessionServicer):
    """The gRPC service: one call of `Open` is one session with one puller.

    Without an announcer there are no handoffs; without `prefixes`, queries are refused.
    """

    def __init__(
        self,
        exporter: Exporter,
        announcer: Announcer | None,
        clock: Clock,
        hello_timeout_s: float,
        prefixes: PrefixExports | None = None,
    ) -> None:
        self._exporter = exporter
        self._announcer = announcer
        self._clock = clock
        self._hello_timeout_s = hello_timeout_s
        self._prefixes = prefixes

    async def Open(self, request_iterator: object, context: Context) -> None:  # noqa: N802
        """Handshake, then serve subscriptions and queries until the puller disconnects."""
        try:
            async with patience(self._hello_timeout_s):
                hello = FROM_PULLER.unwrap(await _read(context))
            if not isinstance(hello, PullerHello):
                raise MalformedMessage(
                    f"a puller sends PullerHello first, not {type(hello).__name__}"
                )
            self._exporter.check_hello(hello)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello in time")
        except PdserveError as error:
            log.warning("refused a session: %s", error)
            context.set_trailing_metadata((("pdserve-error-code", error.code),))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        else:
            welcome = self._exporter.welcome()
            try:
                await self._introduce(welcome, context)
                await context.write(FROM_EXPORTER.wrap(replace(welcome, answers_pings=True)))
                await self._serve(hello, context)
            finally:
                self._exporter.dismiss(welcome)

    async def _introduce(self, welcome: ExporterWelcome, context: Context) -> None:
        try:
            await self._exporter.introduce(welcome)
        except PeerLost as error:  # another host of this node, with which it ends
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)

    async def _serve(self, hello: PullerHello, context: Context) -> None:
        outbox = Outbox(self._stamped)
        subscriptions = _Subscriptions(self._announcer, outbox.send)
        holds = self._prefixes.open(outbox.send) if self._prefixes is not None else None

        try:
            async with running(outbox.pump(context, FROM_EXPORTER)):
                while (proto := await _read(context)) is not None:
                    for message in FROM_PULLER.unwrap_all(proto):
                        if isinstance(message, Ping):
                            outbox.send(Pong())
                        else:
                            _receive(message, subscriptions, holds)
        except MalformedMessage as error:
            log.warning("session with %s: %s", hello.node_id, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        finally:
            if holds is not None:
                holds.close()
            subscriptions.close()

    def _stamped(self, message: msgspec.Struct) -> msgspec.Struct:
        if isinstance(message, HandoffRecord):
            return replace(message, written_s=self._clock.now())
        return message


class _Subscriptions:
    """The subscriptions of one session, by the ids that the puller gave them.

    Each has a subscriber of its own, so that the announcer never confuses several subscriptions to
    the same request, one after the other or at the same time.
    """

    def __init__(self, announcer: Announcer | None, send: Callable[[msgspec.Struct], None]) -> None:
        self._announcer = announcer
        self._send = send
        self._opened: dict[str, tuple[str, Subscriber]] = {}  # id |-> (request id, subscriber)

    def open(self, message: Subscribe) -> None:
        if self._announcer is None or message.subscription_id in self._opened:
            why = "this node hands nothing off" if self._announcer is None else "the id is in use"
            raise MalformedMessage(f"cannot subscribe as {message.subscription_id!r}: {why}")
        subscriber = partial(self._send_to, message.subscription_id)
        request_id = message.request_id
        self._opened[message.subscription_id] = request_id, subscriber
        if message.num_emitted:
            self._announcer.subscribe_to_stream(
                request_id, subscriber, message.num_emitted, message.taker
            )
        else:
            self._announcer.subscribe(request_id, subscriber, at_end=message.at_end)

    def take_over(self, subscription_id: str) -> None:
        if self._announcer is not None and subscription_id in self._opened:
            self._announcer.take_over(*self._opened[subscription_id])

    def renew(self, subscription_id: str) -> None:
        if self._announcer is not None and subscription_id in self._opened:
            self._announcer.renew(*self._opened[subscription_id])

    def settle(self, subscription_id: str, *, was_pulled: bool) -> None:
        """Unknown ids are ignored: they may be of queries whose lease has expired."""
        opened = self._opened.pop(subscription_id, None)
        if self._announcer is not None and opened is not None:
            self._announcer.settle(*opened, was_pulled=was_pulled)

    def close(self) -> None:
        if self._announcer is not None:
            for request_id, subscriber in self._opened.values():
                self._announcer.unsubscribe(request_id, subscriber)

    def _send_to(self, subscription_id: str, message: HandoffMessage) -> None:
        self._send(replace(message, subscription_id=subscription_id))


def _receive(
    message: msgspec.Struct, subscriptions: _Subscriptions, holds: PrefixHolds | None
) -> None:
    match message:
        case Subscribe():
            subscriptions.open(message)
        case PrefixQuery() if holds is not None:
            holds.answer(message)
        case Settle(subscription_id=query_id) if holds is not None and query_id in holds:
            holds.settle(query_id)
        case Settle(subscription_id=subscription_id, pulled=pulled):
            subscriptions.settle(subscription_id, was_pulled=pulled)
        case TakeOver(subscription_id=subscription_id):
            subscriptions.take_over(subscription_id)
        case Renew(subscription_id=subscription_id):
            subscriptions.renew(subscription_id)
        case other:
            name = type(other).__name__
            raise MalformedMessage(f"a puller cannot send {name} after its hello")


async def _read(context: Context) -> PullerMessages | None:
    try:
        proto = await context.read()
    except DecodeError as error:
        raise MalformedMessage("a message cannot be decoded as PullerMessages") from error
    return None if proto is grpc.aio.EOF else proto
