"""The node's end of its stream to one coordinator.

A node dials every coordinator it is given and keeps dialling; coordinators share nothing. While the
stream is open the node is a member; legs that a lost coordinator started are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

import grpc.aio
import msgspec

from pdserve.config import Timeouts
from pdserve.errors import MalformedMessage, PdserveError
from pdserve.protocol import (
    CancelLeg,
    DecodeLeg,
    DrainSeen,
    LoadReport,
    NodeHello,
    NodeRole,
    PrefillLeg,
    SetRole,
    Welcome,
)
from pdserve.wire.channel import open_channel
from pdserve.wire.coordinator_pb2 import CoordinatorMessages, NodeMessages
from pdserve.wire.coordinator_pb2_grpc import CoordinatorStub
from pdserve.wire.envelopes import FROM_COORDINATOR, FROM_NODE
from pdserve.wire.outbox import Outbox, running

log = logging.getLogger(__name__)

Stream: TypeAlias = grpc.aio.StreamStreamCall[NodeMessages, CoordinatorMessages]


class LegReceiver(Protocol):
    """Who carries out what a coordinator asks for. None of these may block or raise."""

    def start_prefill(self, leg: PrefillLeg, link: CoordinatorLink) -> None:
        """Begin a prefill leg; answers go to `link`."""
        ...

    def start_decode(self, leg: DecodeLeg, link: CoordinatorLink) -> None:
        """Begin a decode leg; answers go to `link`."""
        ...

    def cancel_leg(self, request_id: str, reason: str) -> None:
        """Stop a leg, if it is still there, without an answer."""
        ...

    def set_role(self, role: NodeRole) -> None:
        """Work for this pool from now on, if that is possible; finish what was begun."""
        ...

    def coordinator_lost(self, link: CoordinatorLink) -> None:
        """Cancel every leg whose answers would go to `link`."""
        ...


def _say_nothing(_: CoordinatorLink) -> None:
    """For links whose coordinator needs no more than a load report at first."""


class CoordinatorLink:
    """Membership at one coordinator.

    `on_attached` is called whenever a stream has been opened; what it sends comes right after the
    first load report.
    """

    def __init__(
        self,
        address: str,
        hello: Callable[[], NodeHello],
        load: Callable[[], LoadReport],
        receiver: LegReceiver,
        timeouts: Timeouts,
        on_attached: Callable[[CoordinatorLink], None] = _say_nothing,
    ) -> None:
        self.address = address
        self._hello = hello
        self._load = load
        self._receiver = receiver
        self._timeouts = timeouts
        self._on_attached = on_attached
        self._outbox: Outbox | None = None  # None while not attached
        self._stream: Stream | None = None
        self._is_leaving = False
        self._drain_seen = asyncio.Event()

    def send(self, message: msgspec.Struct) -> None:
        """Send to the coordinator; dropped when it is gone: its requests are cancelled anyway."""
        if self._outbox is not None:
            self._outbox.send(message)

    @property
    def is_attached(self) -> bool:
        """Whether a coordinator listens."""
        return self._outbox is not None

    def report_load(self) -> None:
        """Send a load report now, because something about it matters at once."""
        self.send(self._load())

    async def run(self) -> None:
        """Attach, serve until the stream breaks, attach again; until cancelled or left."""
        is_news = True  # an unreachable coordinator is worth one line, not one per attempt
        while not self._is_leaving:
            was_attached, pause_s = False, self._timeouts.reconnect_s
            try:
                await self._attach()
            except (grpc.aio.AioRpcError, PdserveError, TimeoutError) as error:
                was_attached = self._outbox is not None
                if _is_refusal(error):  # the next attempt would be refused as well
                    pause_s = self._timeouts.liveness_s
                if (is_news or was_attached) and not self._is_leaving:
                    log.warning("coordinator %s: %s", self.address, _reason(error))
            except Exception:  # whatever it is, a node without coordinators is of no use
                was_attached = self._outbox is not None
                log.exception("the link to coordinator %s failed", self.address)
            finally:
                self._stream = self._outbox = None
                self._drain_seen.set()  # a coordinator that is gone sends nothing either
                self._receiver.coordinator_lost(self)
            is_news = was_attached
            await asyncio.sleep(pause_s)

    async def wait_drain_seen(self) -> None:
        """After DRAINING was reported: wait until the coordinator will send no more legs."""
        if self._outbox is not None:
            await self._drain_seen.wait()

    async def leave(self) -> None:
        """Say everything that is still to be said, then hang up; `run` ends by itself.

        A coordinator that does not listen any more is waited for no longer than `connect_s`.
        """
        self._is_leaving = True
        outbox, stream = self._outbox, self._stream  # `run` forgets them when the stream breaks
        if outbox is None or stream is None:
            return
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                await outbox.flush()
                await stream.done_writing()
        except TimeoutError:
            log.warning("coordinator %s did not hear the last messages", self.address)

    async def _attach(self) -> None:
        async with open_channel(self.address, self._timeouts.liveness_s) as channel:
            stream = CoordinatorStub(channel).Attach()
            async with asyncio.timeout(self._timeouts.connect_s):
                await stream.write(FROM_NODE.wrap(self._hello()))
                welcome = FROM_COORDINATOR.unwrap(await self._read(stream))
            if not isinstance(welcome, Welcome):
                raise MalformedMessage(f"{type(welcome).__name__} instead of a welcome")
            log.info("attached to coordinator %s (%s)", welcome.coordinator_id, self.address)
            self._stream = stream
            self._drain_seen.clear()
            self._outbox = outbox = Outbox()
            self.report_load()
            self._on_attached(self)

            async with running(outbox.pump(stream, FROM_NODE), self._beat()):
                await self._receive(stream)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._timeouts.heartbeat_s)
            self.report_load()

    async def _receive(self, stream: Stream) -> None:
        while True:
            for message in FROM_COORDINATOR.unwrap_all(await self._read(stream)):
                self._heard(message)

    def _heard(self, message: msgspec.Struct) -> None:
        match message:
            case PrefillLeg() as leg:
                self._receiver.start_prefill(leg, self)
            case DecodeLeg() as leg:
                self._receiver.start_decode(leg, self)
            case CancelLeg(request_id=request_id, reason=reason):
                self._receiver.cancel_leg(request_id, reason)
            case SetRole(role=role):
                self._receiver.set_role(role)
            case DrainSeen():
                self._drain_seen.set()
            case other:
                raise MalformedMessage(f"{type(other).__name__} in mid-stream")

    async def _read(self, stream: Stream) -> CoordinatorMessages:
        proto: CoordinatorMessages = await stream.read()
        if proto is grpc.aio.EOF:
            await _raise_status(stream)
        return proto


async def _raise_status(stream: Stream) -> None:
    code, details = await stream.code(), await stream.details()
    raise MalformedMessage(f"the coordinator closed the stream: {code.name} {details}".rstrip())


def _is_refusal(error: BaseException) -> bool:
    return (
        isinstance(error, grpc.aio.AioRpcError)
        and error.code() is grpc.StatusCode.FAILED_PRECONDITION
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or "no answer in time"
