"""Runs the prompts of one call with bounded concurrency."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from coordinator.api.answer.arrivals import Arrivals
from coordinator.api.answer.write_turns import WriteTurns
from coordinator.generation import Generation, Route
from pdserve.clock import Clock
from pdserve.errors import Overloaded, PdserveError
from pdserve.protocol import TokenEvent

AT_ONCE = 64  # prompts of one call that run or are queued at the same time


class PromptRun:
    """Prefill-only requests of one call. Use as a context manager: leaving it cancels what runs.

    A prompt that is refused as Overloaded while others of the call run is retried when one of them
    ends. If none runs, the refusal fails the call; usually only the first prompts meet that.
    """

    def __init__(
        self, start: Callable[[int], Generation], num_prompts: int, clock: Clock, turns: WriteTurns
    ) -> None:
        """`start` starts the prompt of the given index."""
        self._start = start
        self._num_prompts = num_prompts
        self.found: dict[int, TokenEvent] = {}  # prompt index |-> its only event, so far
        self._generations: list[Generation] = []  # started so far, in order of prompts
        self._arrivals = Arrivals((), clock, turns)

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
        """The routes of the prompts started so far."""
        return [generation.route for generation in self._generations]

    async def events(self) -> list[TokenEvent]:
        """Run all prompts; return the one event of each, in their order.

        Raises:
            PdserveError: the error of the first prompt that failed.
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
