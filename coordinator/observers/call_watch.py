"""How the calls of about the last minute ended: totals since the start tell little of now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Final

from coordinator.api.observer import RequestSummary
from coordinator.observers.endings import Ending, ending_of_status
from pdserve.protocol.status import RecentCalls

_HALF_S: Final = 30.0


class CallWatch:
    """Counts calls by error code, of which there are few, in this half minute and the last one."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._half = 0
        self._began_s = inf  # since when calls count
        self._counts: Counter[tuple[Ending, str]] = Counter()
        self._before: Counter[tuple[Ending, str]] = Counter()

    def begin(self) -> None:
        """Count calls that come from now on: nodes are ready, and whoever fails has a fault."""
        self._began_s = self._now()

    def call_ended(self, summary: RequestSummary) -> None:
        """A call has ended, in whatever way."""
        if self._now() - summary.duration_s < self._began_s:
            return
        self._turn()
        self._counts[ending_of_status(summary.status), summary.error_code or ""] += 1

    def recent(self) -> RecentCalls:
        """Return how the calls of this half minute and the last one ended."""
        self._turn()
        counts = self._counts + self._before
        return RecentCalls(
            calls=counts.total(),
            refused={code: n for (ending, code), n in counts.items() if ending is Ending.REFUSED},
            failed={code: n for (ending, code), n in counts.items() if ending is Ending.FAILED},
        )

    def _turn(self) -> None:
        half = int(self._now() / _HALF_S)
        if half != self._half:
            self._before = self._counts if half == self._half + 1 else Counter()
            self._half, self._counts = half, Counter()
