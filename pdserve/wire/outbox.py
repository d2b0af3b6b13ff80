"""Messages on their way into one gRPC stream: anybody may send, one task writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import grpc.aio
import msgspec

from pdserve.wire.convert import Envelope

_ENOUGH_BYTES = 64 * 1024  # in an envelope, for another message not to go in, too


class WritableStream(Protocol):
    """Either end of a gRPC stream."""

    async def write(self, message: Any) -> None:
        """Send one protobuf message."""
        ...


class Outbox:
    """An unbounded queue in front of a stream's `write`.

    Unbounded, because every sender is bounded by itself (a step's tokens, a request's chunks) and a
    peer that does not read is cut by the liveness deadline.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[msgspec.Struct] = asyncio.Queue()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; never blocks, keeps the order."""
        self._queue.put_nowait(message)

    async def pump(self, stream: WritableStream, envelope: Envelope[Any]) -> None:
        """Write messages in order, until cancelled or the stream breaks.

        A write takes a turn of the event loop, often several. Whatever was sent meanwhile goes out
        in one envelope, or each message would wait for those before it, one by one.

        Raises:
            MalformedMessage: a message that the envelope has no room for.
        """
        while True:
            proto = envelope.wrap(await self._queue.get())
            num_messages, num_bytes = 1, 0
            while not self._queue.empty():
                num_bytes += envelope.last_bytes(proto)
                if num_bytes >= _ENOUGH_BYTES:
                    break
                envelope.add(self._queue.get_nowait(), proto)
                num_messages += 1
            await stream.write(proto)
            for _ in range(num_messages):
                self._queue.task_done()

    async def flush(self) -> None:
        """Wait until everything sent so far has been written."""
        await self._queue.join()


@asynccontextmanager
async def running(*companions: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these beside the body and end them with it.

    A companion that fails because the stream broke says nothing: the body, who reads from the same
    stream, is told as well. One that fails for another reason ends the body, and raises its error.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_until_broken(companion)) for companion in companions]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as failures:
        current = asyncio.current_task()
        if current is not None and current.cancelling():  # TaskGroup drops that if there are errors
            raise asyncio.CancelledError from failures
        raise failures.exceptions[0] from None  # one stream, one reason


async def _until_broken(companion: Coroutine[Any, Any, None]) -> None:
    with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        await companion
