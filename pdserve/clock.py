"""Time as an injected interface, so that policies run on a manual clock in tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a clock that never goes backwards."""

    def now(self) -> float:
        """Seconds since an arbitrary point; only differences mean anything."""
        ...


class SystemClock:
    """CLOCK_MONOTONIC: on one host, the same for every process."""

    def now(self) -> float:
        """Seconds since boot."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The time set last."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds


class Stopwatch:
    """Adds up the time during which something was so."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._measured_s = 0.0
        self._started_s: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether it is so now."""
        return self._started_s is not None

    @property
    def seconds(self) -> float:
        """All of it so far, the present run included."""
        return self._measured_s + self._running_s()

    def start(self) -> None:
        """It is so; nothing new when it was so already."""
        if self._started_s is None:
            self._started_s = self._clock.now()

    def stop(self) -> None:
        """It is so no more."""
        self._measured_s += self._running_s()
        self._started_s = None

    def _running_s(self) -> float:
        return 0.0 if self._started_s is None else self._clock.now() - self._started_s
