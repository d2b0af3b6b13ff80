"""The node's end of its stream to one coordinator.

A node connects to each of its coordinators, and reconnects when a stream breaks. It is a member of
the cluster while the stream is open. When it breaks, the legs of that coordinator are cancelled,
but for those that a client may claim through another one. Coordinators share nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeAlias

import grpc.aio
import msgspec

from pdserve.protocol import (
    CancelLeg,
    Claim,
    DecodeLeg,
    Drain,
    DrainSeen,
    LoadAdapter,
    LoadReport,
    NodeHello,
    NodeRole,
    Prefetch,
    PrefillLeg,
    SetRole,
    UnloadAdapter,
    Welcome,
)
from pdserve.protocol.version import check_protocol
from pdserve.settings.timeouts import NodeTimeouts
from pdserve.shared.errors import MalformedMessage, PdserveError
from pdserve.wire.channel import open_channel
from pdserve.wire.coordinator_pb2 import CoordinatorMessages, NodeMessages
from pdserve.wire.coordinator_pb2_grpc import CoordinatorStub
from pdserve.wire.envelopes import FROM_COORDINATOR, FROM_NODE
from pdserve.wire.outbox import Outbox, running
from pdserve.wire.patience import patience
from pdserve.wire.security import OPEN, Security

log = logging.getLogger(__name__)

LEAVE_S = 1.0  # how long a node that leaves waits for a coordinator that does not read
_PAUSE = 1 / 8  # between attempts to attach: of the silence after which a peer counts as lost

Stream: TypeAlias = grpc.aio.StreamStreamCall[NodeMessages, CoordinatorMessages]


class LegReceiver(Protocol):
    """Carries out what a coordinator asks for. No method may block or raise."""

    def start_prefill(self, leg: PrefillLeg, link: CoordinatorLink) -> None:
        """Start a prefill leg; its answers go to `link`."""
        ...

    def start_decode(self, leg: DecodeLeg, link: CoordinatorLink) -> None:
        """Start a decode leg; its answers go to `link`."""
        ...

    def prefetch(self, message: Prefetch, link: CoordinatorLink) -> None:
        """Fetch KV for a stream that is about to move here, and say when that is over."""
        ...

    def claim(self, message: Claim, link: CoordinatorLink) -> None:
        """Say what there is of a request whose former coordinator is lost; it ends here."""
        ...

    def cancel_leg(self, request_id: str, reason: str) -> None:
        """Stop a leg without an answer, if it is still in progress."""
        ...

    def set_role(self, role: NodeRole) -> None:
        """Change to this pool if that is possible; legs in progress are finished."""
        ...

    def drain(self, become: str) -> None:
        """Begin to drain, as after SIGTERM; then go on with this model, unless it is empty."""
        ...

    def load_adapter(self, order: LoadAdapter, link: CoordinatorLink) -> None:
        """Load an adapter, keep it for this coordinator, and say what came of it."""
        ...

    def unload_adapter(self, digest: str, link: CoordinatorLink) -> None:
        """Keep an adapter no longer for this coordinator."""
        ...

    def coordinator_lost(self, link: CoordinatorLink) -> None:
        """Cancel the legs whose answers go to `link`, but for those that can be claimed."""
        ...


def _do_nothing(_: CoordinatorLink) -> None:
    """The default of `on_attached` and `on_refused`."""


class CoordinatorLink:
    """Membership at one coordinator.

    `on_attached` is called whenever a stream has been opened. What it sends follows the first load
    report. `on_refused` is called whenever the coordinator has said that it lets no such node in.
    """

    def __init__(
        self,
        address: str,
        hello: Callable[[], NodeHello],
        load: Callable[[], LoadReport],
        receiver: LegReceiver,
        timeouts: NodeTimeouts,
        on_attached: Callable[[CoordinatorLink], None] = _do_nothing,
        on_refused: Callable[[CoordinatorLink], None] = _do_nothing,
        security: Security = OPEN,
        leave_s: float = LEAVE_S,
    ) -> None:
        self.address = address
        self._hello = hello
        self._load = load
        self._receiver = receiver
        self._timeouts = timeouts
        self._on_attached = on_attached
        self._on_refused = on_refused
        self._security = security
        self._leave_s = leave_s
        self.coordinator = ""  # its incarnation, as it said last
        self.refusal = ""  # why it lets no such node in; empty: it may
        self._outbox: Outbox | None = None  # None while not attached
        self._stream: Stream | None = None
        self._is_leaving = False
        self._drain_seen = asyncio.Event()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; dropped while not attached, since the requests are cancelled then."""
        if self._outbox is not None:
            self._outbox.send(message)

    @property
    def is_attached(self) -> bool:
        """Whether the stream is open."""
        return self._outbox is not None

    def report_load(self) -> None:
        """Send a load report now instead of with the next heartbeat."""
        self.send(self._load())

    async def run(self) -> None:
        """Attach, serve until the stream breaks, and repeat; until cancelled or `leave`."""
        told: set[object] = set()  # kinds of failures logged since the node was last attached
        while not self._is_leaving:
            pause_s = self._timeouts.liveness_s * _PAUSE
            try:
                await self._attach()
            except (grpc.aio.AioRpcError, PdserveError, TimeoutError) as error:
                if _is_refusal(error):  # the next attempt would be refused too
                    pause_s = self._timeouts.liveness_s
                    self.refusal = _reason(error)
                    self._on_refused(self)
                if self.is_attached:
                    told.clear()
                if _kind(error) not in told and not self._is_leaving:
                    told.add(_kind(error))
                    log.warning("coordinator %s: %s", self.address, _reason(error))
            except Exception:  # a bug; but the node must keep its membership
                log.exception("the link to coordinator %s failed", self.address)
            finally:
                self._stream = self._outbox = None
                self._drain_seen.set()  # a lost coordinator sends no more legs
                self._receiver.coordinator_lost(self)
            if not self._is_leaving:
                await asyncio.sleep(pause_s)

    async def wait_drain_seen(self) -> None:
        """After DRAINING was reported: wait until the coordinator cannot send further legs."""
        if self._outbox is not None:
            await self._drain_seen.wait()

    async def leave(self) -> None:
        """Send what is queued, then close the stream; `run` ends by itself.

        Does not wait for a coordinator whose stream breaks, and not for long for one that does
        not read any more.
        """
        self._is_leaving = True
        outbox, stream = self._outbox, self._stream  # `run` clears them when the stream breaks
        if outbox is None or stream is None:
            return
        try:
            async with asyncio.timeout(self._leave_s):
                await outbox.flush()
                await stream.done_writing()
        except TimeoutError:
            log.warning("coordinator %s did not read the last messages", self.address)

    async def _attach(self) -> None:
        liveness_s, security = self._timeouts.liveness_s, self._security
        async with open_channel(self.address, liveness_s, security, "coordinator") as channel:
            stream = CoordinatorStub(channel).Attach(metadata=security.metadata)
            async with patience(self._timeouts.connect_s):
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await stream.write(FROM_NODE.wrap(self._hello()))  # why not, the read says
                welcome = FROM_COORDINATOR.unwrap(await self._read(stream))
            if not isinstance(welcome, Welcome):
                raise MalformedMessage(
                    f"a coordinator sends Welcome first, not {type(welcome).__name__}"
                )
            check_protocol(welcome.protocol, f"coordinator {self.address}")
            log.info("attached to coordinator %s (%s)", welcome.coordinator_id, self.address)
            self.coordinator, self.refusal = welcome.incarnation, ""
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
                self._handle(message)
                await asyncio.sleep(0)  # many legs may come at once: steps must not wait for them

    def _handle(self, message: msgspec.Struct) -> None:
        match message:
            case PrefillLeg() as leg:
                self._receiver.start_prefill(leg, self)
            case DecodeLeg() as leg:
                self._receiver.start_decode(leg, self)
            case CancelLeg(request_id=request_id, reason=reason):
                self._receiver.cancel_leg(request_id, reason)
            case Prefetch():
                self._receiver.prefetch(message, self)
            case Claim():
                self._receiver.claim(message, self)
            case SetRole(role=role):
                self._receiver.set_role(role)
            case Drain(become=become):
                self._receiver.drain(become)
            case LoadAdapter():
                self._receiver.load_adapter(message, self)
            case UnloadAdapter(digest=digest):
                self._receiver.unload_adapter(digest, self)
            case DrainSeen():
                self._drain_seen.set()
            case other:
                name = type(other).__name__
                raise MalformedMessage(f"a coordinator cannot send {name} after its welcome")

    async def _read(self, stream: Stream) -> CoordinatorMessages:
        proto: CoordinatorMessages = await stream.read()
        if proto is grpc.aio.EOF:
            await _raise_status(stream)
        return proto


async def _raise_status(stream: Stream) -> None:
    code, details = await stream.code(), await stream.details()
    raise MalformedMessage(f"the coordinator closed the stream: {code.name} {details}".rstrip())


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in (
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
    )


def _kind(error: BaseException) -> object:
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else type(error)


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or "no answer in time"
