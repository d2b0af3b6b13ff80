"""GET /metrics, on the event loop: the gauges read what only the loop may touch.

A thread of its own would iterate over queues and handoffs while the loop changes them. And here a
connection that says nothing costs a descriptor for a bounded time, not a thread for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST

IDLE_S = 30.0  # of a connection, between two scrapes and before the first one
_protocol_log = logging.getLogger(f"{__name__}.protocol")


class MetricsServer:
    """Serves one process's metrics to anybody. `start` once, `close` once."""

    def __init__(self, exposition: Callable[[], bytes]) -> None:
        self._exposition = exposition
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        _protocol_log.addFilter(_is_worth_logging)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_protocol_log,
            keepalive_timeout=IDLE_S,
            shutdown_timeout=0.1,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which port 0 leaves to the system.

        Raises:
            OSError: the address cannot be listened on.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening, hang up."""
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(body=self._exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Clients send garbage and go away; a traceback for each would only fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)
