"""Simulated time: events run in order of their times, and nothing happens in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf

Action = Callable[[], None]


class Events:
    """A queue of events, and the clock that it advances; simultaneous events stay in order."""

    def __init__(self) -> None:
        self.now_s = 0.0  # the present time, in seconds since the simulation began
        # What is due now comes after what was in the calendar when this moment came.
        self._due: deque[Action] = deque()
        self._calendar: list[tuple[float, int, Action]] = []  # a heap
        self._numbers = count()
        self.is_stopped = False

    def now(self) -> float:
        """As Clock.now."""
        return self.now_s

    def at(self, time_s: float, action: Action) -> None:
        """Schedule an action at this time; now, if the time has passed."""
        if time_s <= self.now_s:
            self._due.append(action)
        else:
            heappush(self._calendar, (time_s, next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        """Schedule an action this many seconds from now."""
        self.at(self.now_s + seconds, action)

    def soon(self, action: Action) -> None:
        """Schedule an action now, after all others that are due."""
        self._due.append(action)

    def run(self, until_s: float = inf) -> bool:
        """Run the events up to this time, including those scheduled meanwhile.

        Return whether all have run; otherwise it is `until_s` now, or `stop` was called.
        """
        due, calendar = self._due, self._calendar
        while (due or calendar) and not self.is_stopped:
            if not due or (calendar and calendar[0][0] <= self.now_s):
                if calendar[0][0] > until_s:
                    self.now_s = until_s
                    return False
                self.now_s, _, action = heappop(calendar)
            else:
                action = due.popleft()
            action()
        return not self.is_stopped

    def stop(self) -> None:
        """Have `run` return after the present event."""
        self.is_stopped = True
