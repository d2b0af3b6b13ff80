"""Many prompts of one call, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType

from coordinator.generation import Generation, Route
from pdserve.errors import Overloaded, PdserveError
from pdserve.protocol import TokenEvent

AT_ONCE = 64  # prompts of one call on nodes, or in line


class PromptRun:
    """Requests that end with their prompts. Use as a context: leaving it frees whatever runs.

    What is refused while others of the call are under way waits for one of them to end: a call is
    refused for its first prompts, and not when most of the work is done.
    """

    def __init__(self, start: Callable[[int], Generation], num_prompts: int) -> None:
        """`start` begins a prompt, by its index."""
        self.routes: list[Route] = []
        self._start = start
        self._num_prompts = num_prompts
        self._num_started = 0
        self._running: dict[int, Generation] = {}  # by prompt
        self._found: dict[int, TokenEvent] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def __aenter__(self) -> PromptRun:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for generation in self._running.values():
            generation.cancel("the call failed, or its client is gone")

    async def events(self) -> list[TokenEvent]:
        """The one event of each prompt, in their order.

        Raises:
            PdserveError: whatever the first to fail has raised.
        """
        while len(self._found) < self._num_prompts:
            self._start_more()
            await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
        return [self._found[index] for index in range(self._num_prompts)]

    def _start_more(self) -> None:
        while len(self._running) < AT_ONCE and self._num_started < self._num_prompts:
            index = self._num_started
            try:
                generation = self._start(index)
            except Overloaded:
                if not self._running:
                    raise
                return
            self._num_started += 1
            self._running[index] = generation
            generation.listen(partial(self._told, index))

    def _told(self, index: int, event: TokenEvent | Exception) -> None:
        if isinstance(event, Exception):
            self._error = self._error or event
        elif not event.embedding:
            self._error = PdserveError("a prompt ended without an embedding")
        else:
            self._found[index] = event
            self.routes.append(self._running.pop(index).route)
        self._news.set()
