"""The outgoing messages of one gRPC stream: any code may send, one task writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import grpc.aio
import msgspec

from pdserve.wire.convert import Envelope
from pdserve.wire.message_queue import MessageQueue

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


async def _until_broken(companion: Coroutine[Any, Any, None]) -> None:
    with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        await companion
