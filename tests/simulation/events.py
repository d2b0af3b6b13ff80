"""Simulated time: events run in order of their times, and nothing happens in between."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf

from pdserve.clock import ManualClock

Action = Callable[[], None]


class Events:
    """A queue of events and the clock that it advances; simultaneous events stay in order."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._calendar: list[tuple[float, int, Action]] = []  # a heap
        self._numbers = count()

    @property
    def now_s(self) -> float:
        return self.clock.now()

    def at(self, time_s: float, action: Action) -> None:
        """Schedule an action at this time; now, if the time has passed."""
        heappush(self._calendar, (max(time_s, self.now_s), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        """Schedule an action this many seconds from now."""
        self.at(self.now_s + seconds, action)

    def run(self, until_s: float = inf) -> None:
        """Run the events up to this time, including those scheduled meanwhile."""
        while self._calendar and self._calendar[0][0] <= until_s:
            time_s, _, action = heappop(self._calendar)
            self.clock.advance(time_s - self.now_s)
            action()
