"""An HTTP server on loopback, whose answers are a test's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ssl import SSLContext

from aiohttp import web

_MOST_BYTES = 2**22  # of a body


@asynccontextmanager
async def serving(
    *routes: web.RouteDef, port: int = 0, tls: SSLContext | None = None
) -> AsyncIterator[str]:
    """Yield its URL. A client that leaves cancels what answers it."""
    app = web.Application(client_max_size=_MOST_BYTES)
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        address = "{}:{}".format(*runner.addresses[0])
        yield f"{'https' if tls else 'http'}://{address}"
    finally:
        await runner.cleanup()
