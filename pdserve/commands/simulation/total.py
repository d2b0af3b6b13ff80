"""Durations of one kind: how many, and all together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Total:
    """A running total."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add one, or `count` with a sum of `seconds`."""
        self.count += count
        self.seconds += seconds

    def add_each(self, seconds: Iterable[float]) -> None:
        """Add several, one by one: so rounding does not depend on who adds how many."""
        for one_s in seconds:
            self.count += 1
            self.seconds += one_s

    @property
    def mean_ms(self) -> float | None:
        """The mean in milliseconds; None: there was none."""
        return 1e3 * self.seconds / self.count if self.count else None
