"""The exporter's end of the sessions: other nodes dial in and are told what they may pull."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

import grpc.aio
import msgspec
from google.protobuf.message import DecodeError

from kv_transfer.exporter import Exporter
from pdserve.errors import MalformedMessage, PdserveError
from pdserve.protocol import PullerHello, Settle, Subscribe
from pdserve.wire import session_pb2_grpc
from pdserve.wire.envelopes import FROM_EXPORTER, FROM_PULLER
from pdserve.wire.outbox import Outbox, running
from pdserve.wire.session_pb2 import ExporterMessage, PullerMessage

log = logging.getLogger(__name__)

Subscriber = Callable[[msgspec.Struct], None]
Context: TypeAlias = grpc.aio.ServicerContext[PullerMessage, ExporterMessage]


class Announcer(Protocol):
    """Who knows which blocks of which request are ready (`prefill_node.handoff`)."""

    def subscribe(self, request_id: str, subscriber: Subscriber) -> None:
        """Send everything about this request to `subscriber`: what was said before, then the rest.

        The request need not be known yet.
        """
        ...

    def unsubscribe(self, request_id: str, subscriber: Subscriber) -> None:
        """The subscriber is gone; another one may come."""
        ...

    def settle(self, request_id: str, *, was_pulled: bool) -> None:
        """Its blocks are not needed any more."""
        ...


class SessionServer(session_pb2_grpc.KvSessionServicer):
    """One call of `Open` is one session with one puller."""

    def __init__(self, exporter: Exporter, announcer: Announcer, hello_timeout_s: float) -> None:
        self._exporter = exporter
        self._announcer = announcer
        self._hello_timeout_s = hello_timeout_s

    async def Open(self, request_iterator: object, context: Context) -> None:  # noqa: N802
        """Handshake, then serve subscriptions until the puller hangs up."""
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                hello = await _read(context)
            if not isinstance(hello, PullerHello):
                raise MalformedMessage(f"{type(hello).__name__} instead of a hello")
            self._exporter.check_hello(hello)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello in time")
        except PdserveError as error:
            log.warning("refused a session: %s", error)
            context.set_trailing_metadata((("pdserve-error-code", error.code),))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        else:
            await context.write(FROM_EXPORTER.wrap(self._exporter.welcome()))
            await self._serve(hello, context)

    async def _serve(self, hello: PullerHello, context: Context) -> None:
        outbox = Outbox()
        subscriptions: set[str] = set()

        try:
            async with running(outbox.pump(context, FROM_EXPORTER)):
                while (message := await _read(context)) is not None:
                    self._receive(message, outbox.send, subscriptions)
        except MalformedMessage as error:
            log.warning("session with %s: %s", hello.node_id, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        finally:
            for request_id in subscriptions:
                self._announcer.unsubscribe(request_id, outbox.send)

    def _receive(self, message: msgspec.Struct, send: Subscriber, subscriptions: set[str]) -> None:
        match message:
            case Subscribe(request_id=request_id):
                subscriptions.add(request_id)
                self._announcer.subscribe(request_id, send)
            case Settle(request_id=request_id, pulled=pulled):
                subscriptions.discard(request_id)
                self._announcer.settle(request_id, was_pulled=pulled)
            case other:
                raise MalformedMessage(f"{type(other).__name__} in mid-session")


async def _read(context: Context) -> msgspec.Struct | None:
    try:
        proto = await context.read()
    except DecodeError as error:
        raise MalformedMessage("not a PullerMessage") from error
    return None if proto is grpc.aio.EOF else FROM_PULLER.unwrap(proto)
