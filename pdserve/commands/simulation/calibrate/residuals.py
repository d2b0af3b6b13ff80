"""Predicted times beside measured ones: how wrong they are, and how these scatter around them."""

from __future__ import annotations

import random
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from pdserve.measured.perf_model import PerfModel
from pdserve.measured.samples import StepSample
from pdserve.protocol import StepCosts

LEAST: Final = 30  # measurements of a kind, to say anything of it
_STRETCH_S = 0.25  # slow moments last about so long
_NUM_STRETCHES = 40  # kept of each kind
_MOST = 2000  # ratios in them, all together


@dataclass(frozen=True, slots=True)
class Found:
    """Predictions beside what was measured, in seconds and in order of time."""

    predicted_s: list[float]
    measured_s: list[float]

    @classmethod
    def of(cls, costs: StepCosts, steps: Sequence[StepSample]) -> Found:
        """Compare steps with what these costs predict."""
        perf = PerfModel(costs)
        return cls([perf.step_s(step.shape) for step in steps], [step.period_s for step in steps])

    def and_then(self, other: Found) -> Found:
        """Return both, one after the other."""
        return Found(self.predicted_s + other.predicted_s, self.measured_s + other.measured_s)

    @property
    def error(self) -> float | None:
        """Mean of |predicted / measured - 1|; None: nothing was measured."""
        pairs = list(zip(self.predicted_s, self.measured_s, strict=True))
        return statistics.fmean(abs(p / m - 1) for p, m in pairs) if pairs else None

    @property
    def slower(self) -> float | None:
        """By which factor all of it took longer than predicted; None: hardly anything did."""
        if len(self.measured_s) < LEAST:
            return None
        return sum(self.measured_s) / sum(self.predicted_s)

    def stretches(self, rng: random.Random) -> list[list[float]]:
        """Draw stretches of successive ratios; all moments are as likely to be in one."""
        if not self.measured_s:
            return []
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        ratios = [round(measured_s / predicted_s, 3) for predicted_s, measured_s in pairs]
        ends_s = list(accumulate(self.predicted_s))
        drawn: list[list[float]] = []
        num_left = _MOST
        for begin in rng.choices(range(len(ratios)), self.predicted_s, k=_NUM_STRETCHES):
            end = max(begin + 1, bisect_right(ends_s, ends_s[begin] + _STRETCH_S))
            stretch = ratios[begin : min(end, begin + num_left)]
            num_left -= len(stretch)
            drawn += [stretch] if stretch else []
        return drawn
