"""Which share of the last seconds a node has computed."""

from __future__ import annotations

from math import exp
from typing import Final

from pdserve.engine.interface import StepReport

MEMORY_S: Final = 5.0  # after which a third of what was seen still counts


class BusyShare:
    """A moving average. A step is seen when it ends, and one longer than the looks counts on."""

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._busy_s = 0.0  # that no look has counted yet
        self._share = 0.0

    def stepped(self, report: StepReport) -> None:
        """Note a step."""
        self._busy_s += report.period_s

    def share(self, now_s: float) -> float:
        """Return the share, at most 1."""
        passed_s = now_s - self._looked_s
        if passed_s > 0:
            seen_s = min(passed_s, self._busy_s)
            self._share += (1 - exp(-passed_s / MEMORY_S)) * (seen_s / passed_s - self._share)
            self._busy_s = min(self._busy_s - seen_s, MEMORY_S)
            self._looked_s = now_s
        return self._share
