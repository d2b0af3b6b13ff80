"""The requests that are kept for the page: the last ones, and the slowest and failed of an hour."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from coordinator.observers.endings import Ending, ending_of_code
from coordinator.page.told import JourneyView, Step
from coordinator.requests.journey import Journey, phases

MOST_LAST: Final = 100
MOST_SLOWEST: Final = 50
MOST_UNANSWERED: Final = 50
_KEPT_S: Final = 3600.0


@dataclass(frozen=True, slots=True, order=True)
class _Ended:
    """A request, in the order of how long it took."""

    took_s: float
    number: int
    at: float = field(compare=False)  # seconds since 1970
    ending: Ending = field(compare=False)
    journey: Journey = field(compare=False)


class EndedRequests:
    """Journeys, numbered from 1."""

    def __init__(self) -> None:
        self.num_ended = 0
        self._last: deque[_Ended] = deque(maxlen=MOST_LAST)
        self._unanswered: deque[_Ended] = deque(maxlen=MOST_UNANSWERED)
        self._slowest: list[_Ended] = []  # a heap: the fastest of them first

    def add(self, journey: Journey, at: float) -> None:
        """A request has ended, in whatever way, at `at` (seconds since 1970)."""
        self.num_ended += 1
        took_s = (journey.ended_s or journey.received_s) - journey.received_s
        ended = _Ended(took_s, self.num_ended, at, ending_of_code(journey.error), journey)
        self._last.append(ended)
        if ended.ending is not Ending.ANSWERED:
            self._unanswered.append(ended)
        if len(self._slowest) >= MOST_SLOWEST and self._slowest[0].took_s < took_s:
            self._forget(at - _KEPT_S)
        if len(self._slowest) < MOST_SLOWEST:
            heapq.heappush(self._slowest, ended)
        elif self._slowest[0] < ended:
            heapq.heapreplace(self._slowest, ended)

    def _forget(self, before: float) -> None:
        """Make room for what is slow now."""
        self._slowest = [ended for ended in self._slowest if ended.at >= before]
        heapq.heapify(self._slowest)

    def since(self, number: int) -> list[JourneyView]:
        """Return those after the first `number` ones, as far as they are kept, oldest first."""
        kept = {one.number: one for one in (*self._slowest, *self._unanswered, *self._last)}
        return [_view(kept[index]) for index in sorted(kept) if index > number]


def _view(ended: _Ended) -> JourneyView:
    journey = ended.journey
    begin_s = journey.received_s
    return JourneyView(
        request_id=journey.request_id,
        ended_at=ended.at,
        ending=ended.ending,
        slo_class=journey.slo_class,
        tenant=journey.tenant,
        prompt_tokens=journey.num_prompt_tokens,
        cached_tokens=journey.num_cached_tokens,
        output_tokens=journey.num_tokens,
        interruptions=sum(attempt.interrupted_s is not None for attempt in journey.attempts),
        error=journey.error,
        steps=[
            Step(
                phase.name,
                (phase.start_s - begin_s) * 1e3,
                (phase.end_s - begin_s) * 1e3,
                phase.node,
            )
            for phase in phases(journey)
        ],
    )
