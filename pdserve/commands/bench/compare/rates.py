"""Which rates to measure for a goodput.

Capacities are not known beforehand, and runs at a wrongly estimated rate are wasted. So every run
counts: rates grow by a factor, a larger one as long as all requests are in time, until every mode
has failed once. Then the widest gap between a rate at which the target was met and the next one at
which it was not is halved, until it is small; and the rates around the least certain crossing are
measured again with other requests, until all are certain enough or there is no time left.

Where time is short, short runs of each mode by itself come first, at rates that double: they say
where the crossings are, so that no longer run is far from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

from pdserve.commands.bench.compare.goodput import (
    INDEPENDENT,
    Dispersion,
    RatePoint,
    attainments,
    goodput,
    merged,
)

GROWTH = 1.5  # factor from one rate to the next
NEAR = 1.25  # the same, where the first rate is known to be near the crossings
_LEAP = 2.0  # factor as long as all requests of all modes were in time
_CLOSE = 1.08  # rates closer than this factor are not distinguished
_LEAST_PROBED, _MOST_PROBED = 0.05, 64  # of the first one: short runs go no further
_LOWEST = 0.3  # of the first rate: goodput below it is not worth finding


def next_rate(
    curves: Sequence[Sequence[RatePoint]],
    start: float,
    target: float,
    width: float = inf,
    dispersion: Dispersion = INDEPENDENT,
    growth: float = GROWTH,
) -> float | None:
    """Return the rate to measure next, for all modes; None if another run would tell little.

    Args:
        curves: the results of each mode so far, all at the same rates.
        start: the first rate.
        target: the attainment that counts as met.
        width: of an interval, as a ratio of its ends, that is certain enough.
        dispersion: as for `goodput`.
        growth: from one rate to the next, unless all requests were in time.
    """
    sorted_curves = [merged(curve) for curve in curves if curve]
    if not sorted_curves:
        return start
    lowest = min(curve[0].rate for curve in sorted_curves)
    highest = max(curve[-1].rate for curve in sorted_curves)
    brackets = [_bracket(curve, target) for curve in sorted_curves]
    if any(above == inf for _, above in brackets):
        leaps = all(curve[-1].is_perfect for curve in sorted_curves)
        return highest * (_LEAP if leaps and growth == GROWTH else growth)
    if any(not below for below, _ in brackets) and lowest > start * _LOWEST:
        return lowest / growth
    closed = [(below, above) for below, above in brackets if below]
    if not closed:
        return None
    below, above = max(closed, key=lambda bracket: bracket[1] / bracket[0])
    if above / below > _CLOSE:
        return sqrt(below * above)
    return _again(sorted_curves, target, width, dispersion)


class Bracket:
    """Where a mode fails by its short runs, at rates that double, or halve from the first one."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._kept, self._late = 0.0, inf

    def next_rate(self) -> float | None:
        """The rate to try next; None: it is known, or not worth finding."""
        if self._kept and self._late < inf:
            return None
        if self._late < inf:
            halved = self._late / _LEAP
            return halved if halved > self._begin * _LEAST_PROBED else None
        doubled = self._kept * _LEAP if self._kept else self._begin
        return doubled if doubled <= self._begin * _MOST_PROBED else None

    def add(self, rate: float, *, is_kept: bool) -> None:
        """Note how a run was."""
        if is_kept:
            self._kept = max(self._kept, rate)
        else:
            self._late = min(self._late, rate)

    @property
    def middle(self) -> float:
        """Its best guess so far."""
        if self._kept and self._late < inf:
            return sqrt(self._kept * self._late)
        if self._late < inf:
            return self._late / sqrt(_LEAP)
        return self._kept * sqrt(_LEAP) if self._kept else self._begin


def _again(
    curves: Sequence[Sequence[RatePoint]], target: float, width: float, dispersion: Dispersion
) -> float | None:
    """Return the rate beside the least certain crossing that has had the fewest requests."""
    if width == inf:
        return None
    widths = []
    for curve in curves:
        found = goodput(curve, target, 0, dispersion)
        unknown = found.high is None or found.low <= 0
        widths.append(inf if unknown or found.high is None else found.high / found.low)
    widest = max(range(len(curves)), key=widths.__getitem__)
    beside = [point for point in curves[widest] if point.rate in _bracket(curves[widest], target)]
    if widths[widest] <= width or len(beside) < 2:
        return None
    return min(beside, key=lambda point: point.num_sent).rate


def _bracket(curve: Sequence[RatePoint], target: float) -> tuple[float, float]:
    """Return the two rates around the crossing: 0 or infinite if it is beyond the rates."""
    kept = sum(share >= target for share in attainments(curve))
    rates = [0.0, *(point.rate for point in curve), inf]
    return rates[kept], rates[kept + 1]
