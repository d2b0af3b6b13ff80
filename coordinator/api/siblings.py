"""Several answers to one prompt: the prompt is computed for the first, the others follow.

They are started when the first one's token 1 is there. By then its KV is cached where it was
computed, so that a follower's prefill is the rest of a block, and its KV goes wherever it is
decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from coordinator.generation import Generation, Route
from pdserve.errors import RequestCancelled
from pdserve.protocol import TokenEvent


class Follower:
    """A Generation that begins when it is let."""

    def __init__(self, start: Callable[[], Generation]) -> None:
        self._start = start
        self._may_begin = asyncio.Event()
        self._started: Generation | None = None
        self._cancelled: str | None = None

    @property
    def route(self) -> Route:
        """See Generation.route."""
        return Route(None, None) if self._started is None else self._started.route

    def begin(self) -> None:
        """The prompt has been computed."""
        self._may_begin.set()

    async def cancel(self, reason: str) -> None:
        """See Generation.cancel."""
        self._cancelled = reason
        self._may_begin.set()
        if self._started is not None:
            await self._started.cancel(reason)

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """See Generation.__aiter__; raises what starting it raises, besides."""
        await self._may_begin.wait()
        if self._cancelled is not None:
            raise RequestCancelled(self._cancelled)
        self._started = self._start()
        async for event in self._started:
            yield event
