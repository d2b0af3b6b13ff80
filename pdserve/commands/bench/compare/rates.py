"""Which rate of a server to measure next, for its goodput.

Capacities are not known beforehand, and runs at a wrongly estimated rate are wasted. So every run
counts, and each server has rates of its own: they double, or halve, until it has kept the promise
at one and failed at another. No server keeps a promise at rates that it could not take without one,
so these are left out on the way down. The gap is halved until it is a fifth. Then the two rates
around the crossing are measured again with other requests, until it is certain enough.

So all rates of a comparison are powers of the fourth root of 2 times the first one: a server has
equal runs, which tell how much chance does, and often the same rates as others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

from pdserve.commands.bench.compare.goodput import RatePoint, attainments, merged

LEAP = 2.0  # factor from one rate to the next, until the crossing is between two
CLOSE = 1.2  # rates closer than this factor are not distinguished
_LOWEST = 0.04  # of the first rate, or of what it takes: less is not worth finding


def next_rate(
    curve: Sequence[RatePoint],
    start: float,
    takes: float,
    target: float,
    *,
    is_certain: bool,
) -> float | None:
    """Return the rate of a server to measure next; None if another run would tell little.

    Args:
        curve: its results so far.
        start: the first rate.
        takes: about the rate at which it serves requests that all come at once.
        target: the attainment that counts as met.
        is_certain: whether its goodput is known closely enough, once it is between close rates.
    """
    points = merged(curve)
    if not points:
        return start
    below, above = _bracket(points, target)
    if above == inf:
        return below * LEAP
    if not below:
        rate = above / LEAP
        while rate > takes:
            rate /= LEAP
        return rate if LEAP * rate > _LOWEST * min(start, takes) else None
    if above / below > CLOSE:
        return sqrt(below * above)
    if is_certain:
        return None
    beside = [point for point in points if point.rate in (below, above)]
    return min(beside, key=lambda point: point.num_sent).rate


def _bracket(curve: Sequence[RatePoint], target: float) -> tuple[float, float]:
    """Return the two rates around the crossing: 0 or infinite if it is beyond the rates."""
    kept = sum(share >= target for share in attainments(curve))
    rates = [0.0, *(point.rate for point in curve), inf]
    return rates[kept], rates[kept + 1]
