"""Runs work until it is done or an event is set."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finishes_before(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, and cancel it if `event` is set first; whether it finished.

    Raises what `work` raises.
    """
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        working.cancel()
        await asyncio.wait({working})
    if working.cancelled():
        return False
    working.result()
    return True
