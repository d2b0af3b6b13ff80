"""A server on loopback that answers completions and shows its metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(complete: Handler, expose: Handler) -> AsyncIterator[str]:
    """Yield the server's host:port."""
    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/metrics", expose)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield "{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()
