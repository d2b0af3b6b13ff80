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
