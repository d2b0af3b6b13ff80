"""Server-sent events over a response that begins with the first of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence

from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies should pass events on at once
}
_ROOM_BYTES = 16 * 1024  # behind a client, below which no connection holds a writer up
_KEEP_ALIVE = b": keep-alive\n\n"
DONE_DATA = "[DONE]"  # of the last event of most streams
DONE = f"data: {DONE_DATA}\n\n".encode()


def framed(data: bytes, name: str = "") -> bytes:
    """An event as it is sent: a JSON text, and what kind of event it is, if that has a name."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"


class SseStream:
    """One stream of events to one client.

    Nothing is sent before the first event, so that a request which fails before that still gets
    a status of its own. Writing waits for the client to read; one that takes nothing for
    `stall_timeout_s` is cut off with ConnectionResetError.
    """

    def __init__(self, request: web.Request, stall_timeout_s: float) -> None:
        # Not the request itself: it leads to its stream, and what leads in a circle is left to the
        # garbage collector, with everything that a call has.
        self._transport = request.transport
        self._stall_timeout_s = stall_timeout_s
        self._response = web.StreamResponse(headers=_HEADERS)

    @property
    def response(self) -> web.StreamResponse:
        """To be returned from the handler."""
        return self._response

    @property
    def is_open(self) -> bool:
        """Whether the status line is out, so that only events can follow."""
        return self._response.prepared

    async def open(self, request: web.Request, headers: Mapping[str, str]) -> None:
        """Send the status line; `headers` come on top of those of every stream."""
        self._response.headers.update(headers)
        await self._response.prepare(request)

    async def send(self, events: Sequence[bytes]) -> None:
        """Send framed events in one write."""
        await self._write(b"".join(events))

    async def keep_alive(self) -> None:
        """Send a comment, which clients skip and proxies count as traffic."""
        await self._write(_KEEP_ALIVE)

    async def close(self) -> None:
        """End the response."""
        await self._in_time(self._response.write_eof())

    async def _write(self, text: bytes) -> None:
        writing = self._response.write(text)
        await (writing if self._has_room(text) else self._in_time(writing))

    def _has_room(self, text: bytes) -> bool:
        """Whether the connection takes this at once, so that nothing has to be timed."""
        if self._transport is None or self._transport.is_closing():
            return False
        return self._transport.get_write_buffer_size() + len(text) < _ROOM_BYTES

    async def _in_time(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await sending
        except TimeoutError as error:
            if self._transport is not None:
                self._transport.abort()
            raise ConnectionResetError("the client stopped reading") from error
