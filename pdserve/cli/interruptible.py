"""Work that is given up when an event comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finishes_before(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, but only until `event` is set; whether it came to its end.

    What `work` raises is raised here.
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
