"""The outgoing messages of one gRPC stream: any code may send, one task writes.

They are written in order, but legs in turns of those who pay for them. A node that is behind reads
slowly, so legs wait. First come, first served would let a caller that sends a thousand of them, and
even one whose clients have left, delay everybody else's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import grpc.aio
import msgspec

from pdserve.protocol import CancelLeg, DecodeLeg, PrefillLeg
from pdserve.wire.convert import Envelope

Leg = PrefillLeg | DecodeLeg


class MessageQueue:
    """Messages by turns.

    Legs of one payer keep their order. A leg that is cancelled before its turn is never sent, and
    neither is its cancel. Any other message comes after all that were added before it.
    """

    def __init__(self) -> None:
        self._first: deque[msgspec.Struct] = deque()
        # Payers in the order of their turns |-> their legs, and cancels of siblings, by request id.
        self._turns: dict[str, dict[str, Leg | CancelLeg]] = {}
        self._payers: dict[str, str] = {}  # request id in a leg that waits |-> its payer

    def __bool__(self) -> bool:
        return bool(self._first or self._turns)

    def add(self, message: msgspec.Struct) -> None:
        """Add a message."""
        if isinstance(message, PrefillLeg | DecodeLeg):
            payer = message.slo.payer
            self._turns.setdefault(payer, {})[message.request_id] = message
            self._payers |= dict.fromkeys(message.request_ids, payer)
        elif isinstance(message, CancelLeg):
            self._cancel(message)
        else:
            while self._turns:
                self._first.append(self._next_leg())
            self._first.append(message)

    def take(self) -> msgspec.Struct:
        """Remove the next message; there must be one."""
        return self._first.popleft() if self._first else self._next_leg()

    def _next_leg(self) -> Leg | CancelLeg:
        payer, legs = next(iter(self._turns.items()))
        request_id, leg = next(iter(legs.items()))
        self._remove(payer, request_id)
        if payer in self._turns:
            self._turns[payer] = self._turns.pop(payer)  # behind the others
        return leg

    def _cancel(self, cancel: CancelLeg) -> None:
        request_id = cancel.request_id
        payer = self._payers.get(request_id)
        if payer is None:  # sent already
            self._first.append(cancel)
        elif request_id in self._turns[payer]:
            self._remove(payer, request_id)
        else:  # a sibling: its prompt is computed for others
            self._turns[payer][request_id] = cancel

    def _remove(self, payer: str, request_id: str) -> None:
        legs = self._turns[payer]
        leg = legs.pop(request_id)
        if not legs:
            del self._turns[payer]
        if not isinstance(leg, CancelLeg):
            for answer_id in leg.request_ids:
                self._payers.pop(answer_id, None)


_ENOUGH_BYTES = 64 * 1024  # an envelope of this size is sent without further messages


class WritableStream(Protocol):
    """Either end of a gRPC stream."""

    async def write(self, message: Any) -> None:
        """Send one protobuf message."""
        ...


class Sender(Protocol):
    """Whatever messages to a peer are given to."""

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, now or later; never blocks."""
        ...


class Outbox:
    """An unbounded queue in front of a stream's `write`.

    It needs no bound: every sender is bounded itself (the tokens of a step, the chunks of a
    request), and a peer that hangs falls silent, so the liveness deadline disconnects it.
    """

    def __init__(
        self, on_write: Callable[[msgspec.Struct], msgspec.Struct] = lambda message: message
    ) -> None:
        """`on_write` returns what is written of a message, when its turn has come."""
        self._on_write = on_write
        self._queue = MessageQueue()
        self._is_filled = asyncio.Event()
        self._is_writing = False
        self._has_ended = False  # nothing is written any more
        self._is_done = asyncio.Event()  # everything is written, or nothing will be any more
        self._is_done.set()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; never blocks. For the order see MessageQueue."""
        self._queue.add(message)
        self._is_filled.set()
        self._look()

    async def pump(self, stream: WritableStream, envelope: Envelope[Any]) -> None:
        """Write messages in order, until cancelled or the stream breaks.

        A write takes one turn of the event loop, often several. So all messages that were sent in
        the meantime go out in one envelope; one by one, each would wait for the writes before it.

        Raises:
            MalformedMessage: a message that protobuf cannot represent.
        """
        try:
            while True:
                await self._is_filled.wait()
                self._is_filled.clear()
                while self._queue:  # a message may have been cancelled since
                    self._is_writing = True
                    await stream.write(self._next(envelope))
                    self._is_writing = False
                self._look()
        finally:
            self._has_ended = True
            self._look()

    async def flush(self) -> None:
        """Wait until everything sent so far has been written, or `pump` has ended."""
        await self._is_done.wait()

    def _next(self, envelope: Envelope[Any]) -> Any:
        """Take the next message, with those that fit into one envelope with it."""
        proto = envelope.wrap(self._on_write(self._queue.take()))
        num_bytes = 0
        while self._queue:
            num_bytes += envelope.last_bytes(proto)
            if num_bytes >= _ENOUGH_BYTES:
                break
            envelope.add(self._on_write(self._queue.take()), proto)
        return proto

    def _look(self) -> None:
        is_done = self._has_ended or not (self._queue or self._is_writing)
        (self._is_done.set if is_done else self._is_done.clear)()


@asynccontextmanager
async def running(*companions: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these coroutines beside the body, and cancel them when it ends.

    A companion that ends because the stream broke is ignored: the body reads from the same stream
    and notices as well. A companion that fails for another reason cancels the body, and its error
    is raised here.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_until_broken(companion)) for companion in companions]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as failures:
        current = asyncio.current_task()
        if current is not None and current.cancelling():  # TaskGroup drops it if there are errors
            raise asyncio.CancelledError from failures
        raise failures.exceptions[0] from None  # all of them failed for the same stream
    finally:
        for companion in companions:  # one that was cancelled before it began says so else
            companion.close()


async def _until_broken(companion: Coroutine[Any, Any, None]) -> None:
    with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        await companion
