"""Calls what decides by time: how long a load has lasted, not that something has happened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)


@asynccontextmanager
async def ticking(
    every_s: float, name: str, look: Callable[[], object], begins: asyncio.Event | None = None
) -> AsyncIterator[None]:
    """Call `look` at regular intervals meanwhile; the log says so if it raises.

    `begins`: set once there is anything to look at; None: there is from the start.
    """

    async def run() -> None:
        said = ""
        if begins is not None:
            await begins.wait()
        while True:
            await asyncio.sleep(every_s)
            try:
                look()
            except Exception as error:  # the next look may see what it can do something about
                if (kind := repr(error)) != said:
                    log.exception("%s failed; it goes on", name)
                    said = kind

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
