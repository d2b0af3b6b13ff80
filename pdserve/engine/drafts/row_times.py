"""Predicted times of steps of decodes, corrected by what steps of as many rows have taken.

A profile has one cost for each row that is sampled. But as long as a product is bound by reading
its matrix, a further row costs next to nothing, and the head of a large vocabulary is most of a
small model: there, the profile may say half as much again for a step that takes a tenth more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from pdserve.measured.perf_model import StepShape

_NEWEST: Final = 0.1  # weight of the newest step in a moving average
_FORGOTTEN: Final = 0.02  # of one other number of rows, with each step: it may be tried again
_MOST_OFF: Final = 2.0  # factor, of a single step: the process may have been paused in it


class RowTimes:
    """Of one node."""

    def __init__(self, step_s: Callable[[StepShape], float]) -> None:
        """`step_s`: in seconds, as profiled."""
        self._step_s = step_s
        self._rows: list[int] = []  # numbers of rows that were seen, ascending
        self._ratios: list[float] = []  # measured to predicted times, of each
        self._turn = 0

    def step_s(self, shape: StepShape) -> float:
        """Return the predicted time of a step of decodes, in seconds."""
        return self._step_s(shape) * self._ratio(shape.num_sampled)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step of decodes that has been computed."""
        predicted_s = self._step_s(shape)
        if predicted_s <= 0 or seconds <= 0:
            return
        off = min(_MOST_OFF, max(1 / _MOST_OFF, seconds / predicted_s))
        rows, place = shape.num_sampled, bisect_left(self._rows, shape.num_sampled)
        if place == len(self._rows) or self._rows[place] != rows:
            self._ratios.insert(place, self._ratio(rows))
            self._rows.insert(place, rows)
        self._ratios[place] += _NEWEST * (off - self._ratios[place])
        self._turn = (self._turn + 1) % len(self._rows)
        if self._turn != place:
            self._ratios[self._turn] += _FORGOTTEN * (1 - self._ratios[self._turn])

    def _ratio(self, rows: int) -> float:
        """Between those of the nearest numbers of rows that were seen; 1 where none was."""
        place, known = bisect_left(self._rows, rows), self._rows
        if not known:
            return 1.0
        if place == len(known):
            return self._ratios[-1]
        if place == 0 or known[place] == rows:
            return self._ratios[place]
        share = (rows - known[place - 1]) / (known[place] - known[place - 1])
        return self._ratios[place - 1] * (1 - share) + self._ratios[place] * share
