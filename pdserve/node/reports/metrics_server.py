"""Serves GET /metrics, and /health for probes, on the event loop; with certificates over TLS.

The gauges read state that only the loop may touch: in a thread of its own, it would read queues and
handoffs while the loop changes them. On the loop, an idle connection costs one descriptor for a
bounded time, instead of a thread. What all scrapes together take of the loop is bounded, too
(`pdserve/prometheus/exposition.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST

from pdserve.node.reports.metrics_tls import metrics_tls
from pdserve.prometheus.exposition import Exposition

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
        tls_dir: Path | None = None,
    ) -> None:
        """
        Args:
            pieces: make the answer of GET /metrics (`Exposition`).
            samples_since: makes the answer of GET /samples?after=NUMBER.
            state: makes that of probes.
            tls_dir: has the node's certificate, if nodes have some. Then all but probes need one.

        Raises:
            ConfigError: there is no certificate in it that can be used.
        """
        self._exposition = Exposition(pieces)
        self._samples_since = samples_since
        self._state = state
        self._tls = None if tls_dir is None else metrics_tls(tls_dir)
        app = web.Application(middlewares=[] if tls_dir is None else [_known_only])
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
async def _known_only(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse who has shown no certificate. With one of another CA, the handshake has failed."""
    if request.path != _PROBES and not request.get_extra_info("peercert"):
        raise web.HTTPForbidden(
            text="show a certificate of the cluster's CA: pdserve certs --role monitor makes one"
        )
    return await handler(request)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Drop tracebacks of malformed requests and broken connections, which would flood the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)
