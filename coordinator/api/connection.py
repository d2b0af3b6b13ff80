"""One client's connection: what it may hold is bounded, and errors are in the API's form below
HTTP, too.

aiohttp parses and answers; here is what it leaves open. What is no HTTP would be answered in plain
text, and who does not read a whole answer would keep it, and the connection, for ever.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from coordinator.api.config import ApiConfig
from coordinator.api.errors import describe, describe_http, describe_protocol

_SLOWEST_BYTES_PER_S = 1024  # at which an answer may be read


class Connection(web.RequestHandler):
    """aiohttp's protocol object."""

    __slots__ = ("_config", "_has_room")

    def __init__(
        self,
        server: web.Server,
        config: ApiConfig,
        logger: logging.Logger,
        has_room: Callable[[], bool],
    ) -> None:
        """`has_room` is asked when it is made: else the client is turned away."""
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=config.idle_timeout_s,
            logger=logger,
            access_log=None,  # type: ignore[arg-type]  # documented, but not in its types
            auto_decompress=False,  # a compressed body is refused; who makes it does not matter
        )
        self._config = config
        self._has_room = has_room

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        if self._has_room():
            super().connection_made(transport)
        else:
            self.close()  # what it may send is not looked at
            transport.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What could not be parsed, or not be answered, is answered so."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        request_id = f"req-{uuid.uuid4().hex}"
        if isinstance(exc, HttpProcessingError):
            reply = describe_protocol(exc)
        else:
            self.log_exception("request %s failed", request_id, exc_info=exc)
            reply = describe(exc or RuntimeError(), request_id, self._config.retry_after_s)
        response = reply.response()
        response.headers["x-request-id"] = request_id
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send it, unless the client stops reading; returns whether that is gone."""
        if isinstance(resp, web.HTTPException):  # raised before there was a handler
            resp = describe_http(resp, request).response()
        reader = _ReaderWatch(self, self._config.stall_timeout_s)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            reader.stop()


class _ReaderWatch:
    """Looks now and then whether a client still reads, and breaks its connection if not."""

    def __init__(self, connection: Connection, interval_s: float) -> None:
        self._connection = connection
        self._interval_s = interval_s
        self._most_bytes = math.inf  # that may be left to be sent when it looks next
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._look)

    def stop(self) -> None:
        """All is sent."""
        self._timer.cancel()

    def _look(self) -> None:
        transport = self._connection.transport
        if transport is None:
            return
        left_bytes = transport.get_write_buffer_size()
        if left_bytes > self._most_bytes:
            transport.abort()
            return
        self._most_bytes = left_bytes - self._interval_s * _SLOWEST_BYTES_PER_S
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._look)
