"""One client's connection: bounded resources, and protocol errors in the API's error format.

aiohttp parses requests and writes answers. By itself it would answer malformed HTTP in plain text,
and a client that does not read its whole answer would hold the answer and the connection forever.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Callable
from typing import cast

from aiohttp import web
from aiohttp.http import WebSocketReader
from aiohttp.http_exceptions import HttpProcessingError

from coordinator.api.config import ApiConfig
from coordinator.api.read.body_budget import BodyBudget
from coordinator.api.server.errors import describe, describe_http, describe_protocol
from coordinator.api.server.outbox import HttpOutbox
from coordinator.api.server.places import Places
from pdserve.shared.errors import BuffersFull

READ_BYTES = 2**16  # buffered of a request that nobody reads yet; up to twice as much arrives
MAX_HEAD_BYTES = 2**16  # of a request's line and headers, which aiohttp bounds only one by one
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\n\r\n"
_SLOWEST_BYTES_PER_S = 1024  # slowest rate at which a client may read an answer


class Connection(web.RequestHandler):
    """aiohttp's protocol object for one connection, with the limits and error format of the API."""

    __slots__ = ("_config", "_count_frames", "_head_bytes", "_places", "_unread", "outbox")

    def __init__(
        self,
        server: web.Server,
        config: ApiConfig,
        logger: logging.Logger,
        places: Places,
        unread: BodyBudget,
    ) -> None:
        """Without a place in `places`, the client is turned away; `unread`: see `HttpOutbox`."""
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=config.idle_timeout_s,
            logger=logger,
            access_log=None,  # type: ignore[arg-type]  # documented, but not in its types
            auto_decompress=False,  # compressed bodies are refused
            read_bufsize=READ_BYTES,
        )
        self._config = config
        self._places = places
        self._unread = unread
        self._head_bytes = 0  # of the request that is to come next
        self._count_frames: Callable[[bytes], bool] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        peer = transport.get_extra_info("peername") or ("",)
        stall_timeout_s, way_out = self._config.stall_timeout_s, cast(asyncio.Transport, transport)
        self.outbox = HttpOutbox(way_out, self._unread, str(peer[0]), stall_timeout_s)
        if self._places.take(self, str(peer[0])):
            super().connection_made(transport)
        else:
            self.close()  # ignore whatever the client sends
            transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._places.leave(self)
        self.outbox.close()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.outbox.drained()
        super().resume_writing()

    def turn_away(self) -> None:
        """Close the connection at once, for want of a place."""
        if self.transport is not None:
            self.transport.abort()

    def identify(self, tenant: str) -> None:
        """Note whose key a request has. Raises Overloaded."""
        self._places.identify(self, tenant)
        self.outbox.identify(tenant)

    def count_frames(self, count: Callable[[bytes], bool]) -> None:
        """Call `count` with what arrives of a WebSocket before it is parsed.

        Once it returns False, what arrives is ignored.
        """
        self._count_frames = count

    def set_parser(
        self, parser: WebSocketReader, data_received_cb: Callable[[], None] | None = None
    ) -> None:
        """See aiohttp; frames that came with the handshake are counted here."""
        count, tail = self._count_frames, self._message_tail
        if tail and count is not None and not count(tail):
            self._message_tail = b""
        super().set_parser(parser, data_received_cb)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._payload_parser is not None:
            if self._count_frames is None or self._count_frames(data):
                super().data_received(data)
            return
        super().data_received(data)
        is_head = self._waiter is not None and not self._messages
        self._head_bytes = self._head_bytes + len(data) if is_head else 0
        if self._head_bytes > MAX_HEAD_BYTES and self.transport is not None:
            self.transport.write(_HEAD_TOO_LARGE)
            self.close()
            self.transport.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the error response to a request that could not be parsed or answered.

        Raises ConnectionError if an answer has been partly sent already.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        request_id = f"req-{uuid.uuid4().hex}"
        if isinstance(exc, HttpProcessingError):
            reply = describe_protocol(exc)
        else:
            if not isinstance(exc, BuffersFull):
                self.log_exception("request %s failed", request_id, exc_info=exc)
            reply = describe(exc or RuntimeError(), request_id, self._config.retry_after_s)
        response = reply.response()
        response.headers["x-request-id"] = request_id
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the response; abort the connection if the client stops reading.

        Returns what aiohttp's method returns.
        """
        if isinstance(resp, web.HTTPException):  # raised before a handler was called
            resp = describe_http(resp, request).response()
        reader = _ReaderWatch(self, self._config.stall_timeout_s)
        try:
            if isinstance(resp, web.Response) and not resp.prepared:
                try:
                    await self.outbox.fit(resp)
                except BuffersFull as error:
                    resp = self.handle_error(request, exc=error)
            return await super().finish_response(request, resp, start_time)
        finally:
            reader.stop()
            self.outbox.end_of_answer()


class _ReaderWatch:
    """Checks periodically that a client still reads its answer; aborts the connection if not."""

    def __init__(self, connection: Connection, interval_s: float) -> None:
        self._connection = connection
        self._interval_s = interval_s
        self._most_bytes = math.inf  # that may still be unsent at the next check
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._look)

    def stop(self) -> None:
        """Stop checking: the answer has been sent."""
        self._timer.cancel()

    def _look(self) -> None:
        transport = self._connection.transport
        if transport is None:
            return
        left_bytes = self._connection.outbox.num_unread
        if left_bytes > self._most_bytes:
            transport.abort()
            return
        self._most_bytes = left_bytes - self._interval_s * _SLOWEST_BYTES_PER_S
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._look)
