"""Bounded waits for what other tasks, threads or the network bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WITHIN_S = 60.0  # however busy the machine is


def leap(seconds: float) -> None:
    """Let so much time pass at once on the running loop's clock, for what has a deadline there.

    A deadline so short that a test can wait for it comes too early on a busy machine.
    """
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


async def at_its_deadline(outcome: asyncio.Future[T], seconds: float) -> T:
    """What comes of a deadline of so many seconds, which begins nobody knows when."""
    while not outcome.done():
        await asyncio.sleep(0.005)
        await turn()
        leap(seconds)
    return await outcome


async def turn() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], *, pause_s: float = 0.005) -> None:
    """Until somebody has made it so who tells nobody; looks every `pause_s`."""
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(pause_s)
