"""Waiting that cancellation does not cut short: for what must not be left behind while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """Wait for it, and return its result. When cancelled, this raises only after it has ended."""
    ended = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        await wait_ended(ended)
        raise


async def wait_ended(ended: asyncio.Future[Any]) -> None:
    """Wait until it has a result or an error, which is not raised, whoever cancels this.

    For one that is being cancelled already, and re-raises that.
    """
    while not ended.done():
        with suppress(asyncio.CancelledError):  # it cannot hurry what this waits for
            await asyncio.wait({ended})
    if not ended.cancelled():
        ended.exception()  # marks it as retrieved
