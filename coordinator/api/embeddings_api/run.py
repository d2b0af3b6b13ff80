"""Many prompts of one call, a few at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from coordinator.api.arrivals import Arrivals
from coordinator.generation import Generation, Route
from pdserve.clock import Clock
from pdserve.errors import Overloaded, PdserveError
from pdserve.protocol import TokenEvent

AT_ONCE = 64  # prompts of one call on nodes, or in line


class PromptRun:
    """Requests that end with their prompts. Use as a context: leaving it frees whatever runs.

    What is refused while others of the call are under way waits for one of them to end. What is
    refused when none is, fails the call: as a rule that happens to its first prompts only.
    """

    def __init__(self, start: Callable[[int], Generation], num_prompts: int, clock: Clock) -> None:
        """`start` begins a prompt, by its index."""
        self._start = start
        self._num_prompts = num_prompts
        self.found: dict[int, TokenEvent] = {}  # so far: of each prompt, its one event
        self._generations: list[Generation] = []  # begun so far, by prompt
        self._arrivals = Arrivals((), clock)

    async def __aenter__(self) -> PromptRun:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._arrivals.close()
        for generation in self._generations:
            generation.cancel("the call failed, or its client is gone")

    @property
    def routes(self) -> list[Route]:
        """Where its prompts ran, or run."""
        return [generation.route for generation in self._generations]

    async def events(self) -> list[TokenEvent]:
        """The one event of each prompt, in their order.

        Raises:
            PdserveError: whatever the first to fail has raised.
        """
        found = self.found
        while len(found) < self._num_prompts:
            self._start_more(num_found=len(found))
            for arrival in await self._arrivals.take():
                if not arrival.event.embedding:
                    raise PdserveError("a prompt ended without an embedding")
                found[arrival.index] = arrival.event
        return [found[index] for index in range(self._num_prompts)]

    def _start_more(self, num_found: int) -> None:
        begun = self._generations
        while len(begun) < min(self._num_prompts, num_found + AT_ONCE):
            try:
                generation = self._start(len(begun))
            except Overloaded:
                if len(begun) == num_found:
                    raise
                return
            begun.append(generation)
            self._arrivals.add(generation)
