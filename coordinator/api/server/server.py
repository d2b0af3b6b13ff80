"""The HTTP server: listens for connections, and shuts down gracefully."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import TracebackType

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from coordinator.api.context import CONTEXT
from coordinator.api.read.body_budget import BodyBudget
from coordinator.api.server.connection import Connection
from coordinator.api.server.https import Https
from coordinator.api.server.outbox import FULL
from coordinator.api.server.places import Places
from pdserve.shared.addresses import format_address, why_not_bound
from pdserve.shared.process.may_pass import config_error
from pdserve.shared.process.open_files import file_limit

OTHER_FILES = 256  # kept for uses other than client connections: nodes, logs, databases
_BACKLOG = 1024  # connections not accepted yet; beyond it, a client retries after a second
ABORT_TIMEOUT_S = 1.0  # for sending an error to clients whose requests are aborted
_NOT_OURS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
_log = logging.getLogger(__name__)
_protocol_log = logging.getLogger(f"{__name__}.protocol")


class HttpServer:
    """Serves an application of `create_app`, from `start` to `stop` or as a context manager."""

    def __init__(
        self,
        app: web.Application,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        https_dir: Path | None = None,
    ) -> None:
        """With `https_dir`, which has a certificate and its key, it speaks HTTPS only.

        Raises:
            ConfigError: they cannot be used.
        """
        self._host = host
        self._port = port
        self._is_closed = False
        self._listener: asyncio.Server | None = None
        self._tasks = app[CONTEXT].tasks
        self._config = app[CONTEXT].config
        self._max_connections = min(
            self._config.max_connections, max(1, file_limit() - OTHER_FILES)
        )
        self._places = Places(self._max_connections, need_keys=app[CONTEXT].tenants.need_keys)
        clock, most = app[CONTEXT].clock, self._config.max_unread_bytes
        self._unread = BodyBudget(most, clock, FULL, spares=True)
        self._https = https_dir and Https(
            https_dir, self._places, self._connection, self._config.handshake_timeout_s
        )
        _protocol_log.addFilter(_is_worth_logging)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that disconnects cancels its request at once
            shutdown_timeout=ABORT_TIMEOUT_S,
        )

    @property
    def port(self) -> int:
        """The port that the server listens on, even if port 0 was requested."""
        return self._port

    @property
    def url(self) -> str:
        """The base URL of the server."""
        return f"{'https' if self._https else 'http'}://{format_address(self._host, self._port)}"

    async def start(self) -> None:
        """Start listening. Raises ConfigError when the address cannot be bound."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._https.accepted if self._https else self._connection,
                self._host,
                self._port,
                backlog=_BACKLOG,
            )
        except OSError as error:
            await self._runner.cleanup()
            address = format_address(self._host, self._port)
            what = f"cannot listen on {address}: {why_not_bound(error)}"
            raise config_error(what, error) from error
        self._port = self._listener.sockets[0].getsockname()[1]
        if self._max_connections < self._config.max_connections:
            _log.warning(
                "the limit of %d open files leaves room for %d client connections: raise it "
                "(ulimit -n) to %d for all %d",
                file_limit(),
                self._max_connections,
                self._config.max_connections + OTHER_FILES,
                self._config.max_connections,
            )

    async def stop(self, grace_s: float = 30.0) -> None:
        """Refuse new requests, give running ones `grace_s` to finish, abort the rest, and close."""
        if self._listener is not None:
            self._listener.close()
        try:
            await self._tasks.drain(grace_s)
        finally:  # also when `stop` itself is cancelled, for a faster shutdown
            await self._tasks.abort(ABORT_TIMEOUT_S)
            await self._close_connections()

    def _connection(self) -> Connection:
        assert self._runner.server is not None
        server, config = self._runner.server, self._config
        return Connection(server, config, _protocol_log, self._places, self._unread)

    async def _close_connections(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._https:
            self._https.close()
        server = self._runner.server
        transports = [] if server is None else [c.transport for c in server.connections]
        await self._runner.cleanup()
        for transport in transports:  # a plain close would wait for clients that stopped reading
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
    """Return False for errors caused by clients: malformed HTTP and lost connections.

    A traceback for each of them would only fill the log.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, _NOT_OURS)
