"""Simulated time: events run in order of their times, and nothing happens in between."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf

Action = Callable[[], None]


class VirtualClock:
    """A clock that stands at the time of the present event."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        """As Clock.now."""
        return self.now_s


class Events:
    """A queue of events and the clock that it advances; simultaneous events stay in order."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._calendar: list[tuple[float, int, Action]] = []  # a heap
        self._numbers = count()
        self.is_stopped = False

    @property
    def now_s(self) -> float:
        """The present time, in seconds since the simulation began."""
        return self.clock.now_s

    def at(self, time_s: float, action: Action) -> None:
        """Schedule an action at this time; now, if the time has passed."""
        heappush(self._calendar, (max(time_s, self.clock.now_s), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        """Schedule an action this many seconds from now."""
        heappush(self._calendar, (self.clock.now_s + seconds, next(self._numbers), action))

    def run(self, until_s: float = inf) -> None:
        """Run the events up to this time, including those scheduled meanwhile."""
        calendar, clock = self._calendar, self.clock
        while calendar and calendar[0][0] <= until_s and not self.is_stopped:
            clock.now_s, _, action = heappop(calendar)
            action()

    def stop(self) -> None:
        """Have `run` return after the present event."""
        self.is_stopped = True
