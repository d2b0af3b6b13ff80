"""Chooses the rates to measure: first ascending until all modes have failed, then at the crossings.

Capacities are not known beforehand, and runs at a wrongly estimated rate are wasted. So every run
counts: rates grow by a factor, a larger one as long as all requests are in time, until every mode
has failed once. The remaining time goes into the widest gap between a rate at which the target was
met and the next one at which it was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pdserve.bench.compare.goodput import RatePoint

GROWTH = 1.5
_LEAP = 2.0  # factor as long as all requests of all modes were in time
_CLOSE = 1.08  # rates closer than this factor are not distinguished
_LOWEST = 0.3  # of the first rate: goodput below it is not worth finding


def next_rate(curves: Sequence[Sequence[RatePoint]], start: float, target: float) -> float | None:
    """Return the rate to measure next, for all modes; None if another rate would tell little.

    Args:
        curves: the results of each mode so far, all at the same rates.
        start: the first rate.
        target: the attainment that counts as met.
    """
    sorted_curves = [sorted(curve, key=lambda point: point.rate) for curve in curves if curve]
    if not sorted_curves:
        return start
    lowest = min(curve[0].rate for curve in sorted_curves)
    highest = max(curve[-1].rate for curve in sorted_curves)
    if any(all(p.attainment >= target for p in curve) for curve in sorted_curves):
        leaps = all(curve[-1].met == curve[-1].sent for curve in sorted_curves)
        return highest * (_LEAP if leaps else GROWTH)
    if any(curve[0].attainment < target for curve in sorted_curves) and lowest > start * _LOWEST:
        return lowest / GROWTH
    brackets = [bracket for curve in sorted_curves if (bracket := _bracket(curve, target))]
    if not brackets:
        return None
    low, high = max(brackets, key=lambda bracket: bracket[1] / bracket[0])
    return (low * high) ** 0.5 if high / low > _CLOSE else None


def _bracket(curve: Sequence[RatePoint], target: float) -> tuple[float, float] | None:
    """Return the two rates around the first crossing."""
    for earlier, later in pairwise(curve):
        if earlier.attainment >= target > later.attainment:
            return earlier.rate, later.rate
    return None
