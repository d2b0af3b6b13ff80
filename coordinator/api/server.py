"""The socket in front of the application, and its orderly end."""

from __future__ import annotations

import logging
from types import TracebackType

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from coordinator.api.context import CONTEXT
from pdserve.errors import ConfigError

ABORT_TIMEOUT_S = 1.0  # for telling clients that their request is cut off
_NOT_OURS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
_protocol_log = logging.getLogger(f"{__name__}.protocol")


class HttpServer:
    """Serves an application of `create_app` from `start` to `stop`; or use as a context."""

    def __init__(self, app: web.Application, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._port = port
        self._is_closed = False
        self._in_flight = app[CONTEXT].in_flight
        _protocol_log.addFilter(_is_worth_logging)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that goes away ends its request at once
            access_log=None,
            logger=_protocol_log,
            keepalive_timeout=app[CONTEXT].config.idle_timeout_s,
            shutdown_timeout=ABORT_TIMEOUT_S,
        )

    @property
    def port(self) -> int:
        """The port listened on, also when 0 was asked for."""
        return self._port

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address cannot be had."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}") from error
        self._port = self._runner.addresses[0][1]

    async def stop(self, grace_s: float = 30.0) -> None:
        """Take no new requests, let running ones end for `grace_s`, then tell the rest and go."""
        for site in self._runner.sites:
            await site.stop()
        try:
            await self._in_flight.drain(grace_s)
        finally:  # also when this is cancelled, because somebody is in a hurry
            await self._in_flight.abort(ABORT_TIMEOUT_S)
            await self._close_connections()

    async def _close_connections(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        server = self._runner.server
        transports = [] if server is None else [c.transport for c in server.connections]
        await self._runner.cleanup()
        for transport in transports:  # closing waits for clients that stopped reading: no more
            if transport is not None:
                transport.abort()

    async def __aenter__(self) -> HttpServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop(grace_s=0.0)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Clients send garbage and go away; a traceback for each would only fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, _NOT_OURS)
