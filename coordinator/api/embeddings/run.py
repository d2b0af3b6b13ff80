"""Runs the prompts of one call with bounded concurrency."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final

from coordinator.api.answer.arrivals import PIECE, Arrivals, LongWork
from coordinator.api.context import ApiContext, RequestTrace
from coordinator.generation import Generation, Route
from pdserve.protocol import TokenEvent
from pdserve.shared.errors import Overloaded, PdserveError

_START: Final = PIECE  # what it is to start a prompt, as long work counts


class PromptRun:
    """Prefill-only requests of one call. Use as a context manager: leaving it cancels what runs.

    A prompt that is refused as Overloaded while others of the call run is retried when one of them
    ends. If none runs, the refusal fails the call; usually only the first prompts meet that.
    """

    def __init__(
        self,
        start: Callable[[int], Generation],
        num_prompts: int,
        context: ApiContext,
        trace: RequestTrace,
    ) -> None:
        """`start` starts the prompt of the given index."""
        self._start = start
        self._num_prompts = num_prompts
        self._places = context.prompt_places
        self._payer, self._call = trace.payer, trace.unique
        self._long_work = LongWork(context.long_turns)
        self.found: dict[int, TokenEvent] = {}  # prompt index |-> its only event, so far
        self._generations: list[Generation] = []  # started so far, in order of prompts
        self._num_places = 0  # that the call has
        self._arrivals = Arrivals((), context.clock, context.write_turns)

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
        while self._num_places:
            self._give_back()

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
            await self._start_more()
            for arrival in await self._arrivals.take():
                if arrival.event.finish_reason is None:
                    raise PdserveError("a prompt did not end with its first event")
                found[arrival.index] = arrival.event
                self._give_back()
        return [found[index] for index in range(self._num_prompts)]

    async def _start_more(self) -> None:
        """Start prompts for as long as there are places; wait for one if none runs."""
        begun = self._generations
        while len(begun) < self._num_prompts and await self._has_place():
            try:
                generation = self._start(len(begun))
            except Overloaded:
                self._give_back()
                if len(begun) == len(self.found):
                    raise
                return
            begun.append(generation)
            self._arrivals.add(generation)
            await self._long_work.did(_START)

    async def _has_place(self) -> bool:
        if self._num_places == 0:
            await self._places.take(self._payer, self._call)
        elif not self._places.try_take(self._payer):
            return False
        self._num_places += 1
        return True

    def _give_back(self) -> None:
        self._num_places -= 1
        self._places.give_back(self._payer)
