"""Time as an injected interface, so that policies run on a manual clock in tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary point; only differences are meaningful."""
        ...


class SystemClock:
    """CLOCK_MONOTONIC: on one host, the same for every process."""

    def now(self) -> float:
        """Seconds since boot."""
        return time.monotonic()


class ManualClock:
    """A clock for tests, which moves only when it is told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The current manual time."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds


class Stopwatch:
    """Accumulates the time during which a condition holds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._measured_s = 0.0
        self._started_s: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._started_s is not None

    @property
    def seconds(self) -> float:
        """Total running time so far, including the current run."""
        return self._measured_s + self._running_s()

    def start(self) -> None:
        """Start, unless it is running already."""
        if self._started_s is None:
            self._started_s = self._clock.now()

    def stop(self) -> None:
        """Stop; nothing happens if it is not running."""
        self._measured_s += self._running_s()
        self._started_s = None

    def _running_s(self) -> float:
        return 0.0 if self._started_s is None else self._clock.now() - self._started_s
