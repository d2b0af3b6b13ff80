"""Serves GET /metrics, and /health for probes, on the event loop; with certificates over TLS.

All but probes are for who shows a certificate or, without those, for who may read (`readers.py`).

The gauges read state that only the loop may touch: in a thread of its own, it would read queues and
handoffs while the loop changes them. On the loop, an idle connection costs one descriptor for a
bounded time, instead of a thread. What all scrapes together take of the loop is bounded, too
(`pdserve/shared/prometheus/exposition.py`).
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST

from pdserve.shared.addresses import host_in, is_loopback
from pdserve.shared.process.certificates import (
    CA_FILE,
    CERT_FILE,
    KEY_FILE,
    Reloaded,
    mutual_context,
)
from pdserve.shared.prometheus.exposition import Exposition


def metrics_tls(directory: Path) -> ssl.SSLContext:
    """Return TLS that asks for a certificate, and goes on without one: probes have none.

    Connections that come after the files changed use the new ones.

    Raises:
        ConfigError: they cannot be used.
    """
    files = Reloaded(directory, (CA_FILE, CERT_FILE, KEY_FILE), _context)
    context = files.latest()

    def use_latest(connection: ssl.SSLObject, *_: object) -> None:
        connection.context = files.latest()

    context.sni_callback = use_latest  # called in each handshake, also if no name is asked for
    return context


def _context(directory: Path) -> ssl.SSLContext:
    context = mutual_context(ssl.PROTOCOL_TLS_SERVER, directory)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


MayRead: TypeAlias = Callable[[str | None], Awaitable[bool]]

IDLE_S = 30.0  # after which an idle connection is closed
STANDBY = "standby"  # the state of a node that has loaded, and waits for a pool
_WELL = ("ready", STANDBY)
_PROBES = "/health"
_protocol_log = logging.getLogger(f"{__name__}.protocol")


class MetricsServer:
    """Serves the metrics of one process. `start` once, `close` once."""

    def __init__(
        self,
        pieces: Callable[[], Iterator[bytes]],
        samples_since: Callable[[int], bytes],
        state: Callable[[], str],
        may_read: MayRead,
        tls_dir: Path | None = None,
    ) -> None:
        """
        Args:
            pieces: make the answer of GET /metrics (`Exposition`).
            samples_since: makes the answer of GET /samples?after=NUMBER.
            state: makes that of probes.
            may_read: says whether who shows a key may have the others, where nodes have no
                certificates.
            tls_dir: has the node's certificate, if nodes have some. Then all but probes need one.

        Raises:
            ConfigError: there is no certificate in it that can be used.
        """
        self._exposition = Exposition(pieces)
        self._samples_since = samples_since
        self._state = state
        self._tls = None if tls_dir is None else metrics_tls(tls_dir)
        guard = _readers_only(may_read) if tls_dir is None else _known_only
        app = web.Application(middlewares=[guard])
        app.router.add_get(_PROBES, self._answer_probe)
        app.router.add_get("/metrics", self._answer)
        app.router.add_get("/samples", self._answer_samples)
        _protocol_log.addFilter(_is_worth_logging)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_protocol_log,
            keepalive_timeout=IDLE_S,
            shutdown_timeout=0.1,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen on a port, or on any free one for port 0; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=self._tls).start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        await self._runner.cleanup()

    async def _answer_probe(self, request: web.Request) -> web.Response:
        """For probes, without a certificate: 200 while the node is ready or on standby."""
        state = self._state()
        return web.Response(text=state, status=200 if state in _WELL else 503)

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(
            body=await self._exposition.text(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _answer_samples(self, request: web.Request) -> web.Response:
        try:
            after = int(request.query.get("after", "0"))
        except ValueError as error:
            raise web.HTTPBadRequest(text="after must be the number of a sample") from error
        return web.Response(body=self._samples_since(after), content_type="application/json")


@web.middleware
async def _known_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse who has shown no certificate. With one of another CA, the handshake has failed."""
    if request.path != _PROBES and not request.get_extra_info("peercert"):
        raise web.HTTPForbidden(
            text="show a certificate of the cluster's CA: pdserve certs --role monitor makes one"
        )
    return await handler(request)


def _readers_only(may_read: MayRead) -> Middleware:
    """Refuse who shows no key that may read, unless anybody may."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != _PROBES:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            shown = key.strip() if scheme.lower() == "bearer" else None
            if shown is None and _is_misled(request):
                raise web.HTTPForbidden(text="use this machine's own name or address")
            if not await may_read(shown):
                raise web.HTTPUnauthorized(
                    text="an API key or the token of access.metrics_token_file is needed: send it "
                    "as 'Authorization: Bearer'"
                )
        return await handler(request)

    return check


def _is_misled(request: web.Request) -> bool:
    """Whether a page has pointed its own name at this machine (DNS rebinding)."""
    host, own = request.headers.get("Host"), request.get_extra_info("sockname")
    return host is not None and is_loopback(str(own[0])) and not is_loopback(host_in(host))


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Drop tracebacks of malformed requests and broken connections, which would flood the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)
