"""Many prompts of one call, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
        self._running: dict[asyncio.Task[TokenEvent], tuple[int, Generation]] = {}

    async def __aenter__(self) -> PromptRun:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Shielded: who waits for the answer may be gone already, and is cancelled.
        await asyncio.shield(self._cancel_rest())

    async def events(self) -> list[TokenEvent]:
        """The one event of each prompt, in their order.

        Raises:
            PdserveError: whatever the first to fail has raised.
        """
        found: dict[int, TokenEvent] = {}
        while len(found) < self._num_prompts:
            self._start_more()
            ended, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for reader in ended:
                event = reader.result()
                index, generation = self._running.pop(reader)
                self.routes.append(generation.route)
                found[index] = event
        return [found[index] for index in range(self._num_prompts)]

    def _start_more(self) -> None:
        while len(self._running) < AT_ONCE and self._num_started < self._num_prompts:
            try:
                generation = self._start(self._num_started)
            except Overloaded:
                if not self._running:
                    raise
                return
            self._running[asyncio.create_task(_only_event(generation))] = (
                self._num_started,
                generation,
            )
            self._num_started += 1

    async def _cancel_rest(self) -> None:
        readers = list(self._running)
        for reader, (_, generation) in self._running.items():
            reader.cancel()
            await generation.cancel("the call failed, or its client is gone")
        await asyncio.gather(*readers, return_exceptions=True)


async def _only_event(generation: Generation) -> TokenEvent:
    events = [event async for event in generation]
    if not events or not events[-1].embedding:
        raise PdserveError("a prompt ended without an embedding")
    return events[-1]
