"""Both ends of a gRPC stream between two processes of a life."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.lives.loop import Process

if TYPE_CHECKING:
    from tests.lives.network import Network

MOST_UNREAD = 12  # messages, after which a writer waits: flow control


@dataclass(frozen=True, slots=True)
class Ended:
    """The last item of a pipe."""

    error: grpc.aio.AioRpcError | None  # None: all is well


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client has left without a word."""


def unavailable(details: str) -> grpc.aio.AioRpcError:
    """What a client gets of a broken connection."""
    return _status(grpc.StatusCode.UNAVAILABLE, details)


def _status(
    code: grpc.StatusCode, details: str, trailing: grpc.aio.Metadata | None = None
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), trailing or grpc.aio.Metadata(), details=details
    )


class Pipe:
    """One direction."""

    def __init__(
        self,
        network: Network,
        source: Process,
        target: Process,
        on_end: Callable[[Ended | Cancelled], None] = lambda _: None,
    ) -> None:
        self.source = source
        self.target = target
        self.last_s = 0.0  # when the last item arrives
        self.end: Ended | None = None  # has arrived
        self.is_closed = False  # nothing more can be written
        self._network = network
        self._on_end = on_end
        self._items: deque[Any] = deque()  # arrived, not read
        self._num_unread = 0  # written, not read
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    async def write(self, message: Any) -> None:
        """Send a message, when there is room for it."""
        await asyncio.sleep(0)
        while self._num_unread >= MOST_UNREAD and not self.is_closed:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        if self.is_closed:
            raise asyncio.InvalidStateError("the call has ended")
        self._num_unread += 1
        self._network.carry(self, message)

    def finish(self, last: Ended | Cancelled) -> None:
        """Send the last item."""
        if not self.is_closed:
            self.close()
            self._network.carry(self, last)

    def close(self) -> None:
        """Let nobody write any more."""
        self.is_closed = True
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def snap(self, error: grpc.aio.AioRpcError, *, drops: bool) -> None:
        """It is broken: the other end reads this error, now or after what is under way."""
        self.close()
        if drops:
            self._items.clear()
            self._ended(Ended(error))
        else:
            self._network.carry(self, Ended(error))

    def arrive(self, item: Any) -> None:
        """An item is at the other end."""
        if self.end is not None:
            return
        if isinstance(item, Ended | Cancelled):
            self._ended(item)
            return
        self._network.trace.note(f"{self.source} -> {self.target}", item)
        self._items.append(item)
        self._wake_reader()

    async def read(self) -> Any:
        """The next message, or EOF. Raises AioRpcError: it is broken."""
        while not self._items:
            if self.end is not None:
                if self.end.error is not None:
                    raise self.end.error
                return grpc.aio.EOF
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._num_unread -= 1
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
        return self._items.popleft()

    def _ended(self, item: Ended | Cancelled) -> None:
        if self.end is None:
            self.close()
            self.end = item if isinstance(item, Ended) else Ended(unavailable("the client left"))
            self._wake_reader()
            self._on_end(item)

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Connection:
    """One call of one method; the client's end has the methods of a gRPC call."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.client = client
        self.server = server
        self.up = Pipe(network, client, server, self._client_ended)
        self.down = Pipe(network, server, client, lambda _: self.up.close())
        self._network = network
        self._handler: asyncio.Task[None] | None = None

    def call(self, method: Callable[[Any, Any], Any]) -> None:
        """Have the server handle the call, as soon as it hears of it."""
        way = self._network.way(self.client, self.server)
        delay_s = self._network.delay_s(way)
        self._network.loop.call_later(delay_s, self._handle, method, context=self.server.context)

    @property
    def is_served(self) -> bool:
        """Whether the server's method runs; it is cancelled when the client is known to be gone."""
        return self._handler is not None and not self._handler.done()

    # ---- the client's end ----------------------------------------------------------------------

    async def write(self, message: Any) -> None:
        await self.up.write(message)

    async def read(self) -> Any:
        return await self.down.read()

    async def done_writing(self) -> None:
        self.up.finish(Ended(None))

    async def code(self) -> grpc.StatusCode:
        end = self.down.end
        return end.error.code() if end is not None and end.error else grpc.StatusCode.OK

    async def details(self) -> str:
        end = self.down.end
        return (end.error.details() or "") if end is not None and end.error else ""

    def leave(self) -> None:
        """The client closes its channel."""
        self.down.close()
        if self.up.end is None:
            self.up.close()
            self._network.carry(self.up, Cancelled())

    # ---- what goes wrong -----------------------------------------------------------------------

    def break_both(self) -> None:
        """Both ends find out now."""
        self.up.snap(unavailable("the connection broke"), drops=True)
        self.down.snap(unavailable("the connection broke"), drops=True)
        self._network.forget(self)

    def break_for_peer_of(self, process: Process, *, drops: bool) -> None:
        """The process is gone, which the other one finds out."""
        pipe = self.down if process is self.server else self.up
        pipe.snap(unavailable(f"{process} is gone"), drops=drops)
        self.up.close()
        self.down.close()
        self._network.forget(self)

    # ---- the server's end ----------------------------------------------------------------------

    def end(self) -> None:
        """The server stops."""
        if self._handler is not None:
            self._handler.cancel()

    def _handle(self, method: Callable[[Any, Any], Any]) -> None:
        if not isinstance(self.up.end, Ended) or self.up.end.error is None:
            self._handler = asyncio.get_running_loop().create_task(
                self._serve(method, ServerContext(self))
            )

    async def _serve(self, method: Callable[[Any, Any], Any], context: ServerContext) -> None:
        last: Ended = Ended(unavailable("the server has stopped"))
        try:
            await method(None, context)
            last = Ended(None)
        except _Aborted:
            last = Ended(_status(context.code, context.details, context.trailing))
        except asyncio.CancelledError:
            if self.up.end is None:
                raise
        except Exception as error:  # noqa: BLE001  a bug; gRPC tells the client
            last = Ended(_status(grpc.StatusCode.UNKNOWN, repr(error)))
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a method of a server raised", "exception": error}
            )
        finally:
            self.up.close()
            self.down.finish(last)
            self._network.forget(self)

    def _client_ended(self, item: Ended | Cancelled) -> None:
        has_left = isinstance(item, Cancelled) or item.error is not None
        if has_left and self._handler is not None:
            self._handler.cancel()  # as gRPC does when a client is gone


class _Aborted(grpc.aio.AbortError):
    pass


class ServerContext:
    """What a servicer sees of its call."""

    def __init__(self, connection: Connection) -> None:
        self.code = grpc.StatusCode.UNKNOWN
        self.details = ""
        self.trailing = grpc.aio.Metadata()
        self._connection = connection

    def peer(self) -> Process:
        return self._connection.client

    async def read(self) -> Any:
        try:
            return await self._connection.up.read()
        except grpc.aio.AioRpcError:  # the handler is cancelled instead
            await asyncio.get_running_loop().create_future()

    async def write(self, message: Any) -> None:
        """What is written to a client that has left, and is not known to have, goes nowhere."""
        try:
            await self._connection.down.write(message)
        except asyncio.InvalidStateError:
            if not self._connection.is_served:
                raise

    def set_trailing_metadata(self, trailing: Any) -> None:
        self.trailing = grpc.aio.Metadata(*trailing)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        raise _Aborted
