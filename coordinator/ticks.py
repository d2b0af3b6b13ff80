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
    """Call `look` at regular intervals meanwhile; if it raises, the log says that `name` ended.

    `begins`: set once there is anything to look at; None: there is from the start.
    """

    async def run() -> None:
        try:
            if begins is not None:
                await begins.wait()
            while True:
                await asyncio.sleep(every_s)
                look()
        except Exception:
            log.exception("%s has ended", name)  # nothing awaits this task

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
