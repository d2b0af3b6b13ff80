"""The goodput of a deployment: rates are bisected until the crossing is enclosed closely."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from pdserve.commands.bench.compare.goodput import Goodput, RatePoint, goodput, merged
from pdserve.commands.bench.compare.shown.verdict import dispersion
from pdserve.commands.simulation.predict.deployment import Result
from pdserve.commands.simulation.predict.load import RateOutside

GROWTH = 1.5  # factor between rates until the crossing is enclosed
_MOST = 24  # rates

Runs = Sequence[Result]
"""The runs at one rate, one per seed."""


class Found(NamedTuple):
    """What a search has found."""

    goodput: Goodput  # "above the rates": above all that lie within the calibration
    runs: list[Runs]  # by rate, ascending
    outside: list[float]  # rates that cannot be predicted
    why: str  # it is so, of the lowest of them


def find_goodput(
    runs_at: Callable[[float], Runs], start: float, target: float, close: float
) -> Found:
    """Search for the goodput. What is said of rates beyond one outside the calibration is left out.

    Args:
        runs_at: simulates a rate.
        start: the first rate, per second.
        target: share of the requests of each kind that must be in time.
        close: factor between the two rates around the crossing, at which the search ends.

    Raises:
        CalibrationError: all rates lie outside of the calibration.
    """
    found: dict[float, Runs] = {}
    outside: list[float] = []
    error: RateOutside | None = None
    low, high, edge, rate = 0.0, inf, inf, start
    while len(found) + len(outside) < _MOST and not (low and min(high, edge) <= low * close):
        try:
            found[rate] = runs_at(rate)
        except RateOutside as at_edge:
            edge, error = rate, at_edge
            outside.append(rate)
        else:
            if pooled(found[rate]).attainment >= target:
                low = rate
            else:
                high = rate
        if min(high, edge) == inf:
            rate = low * GROWTH
        elif not low:
            rate = min(high, edge) / GROWTH
        else:
            rate = (low * min(high, edge)) ** 0.5
    by_rate = [found[rate] for rate in sorted(found)]
    points = [point for rate in sorted(found) if rate < edge for point in _points(found[rate])]
    if not points and error is not None:
        raise error
    found_goodput = goodput(points, target, 0, dispersion([points]))
    return Found(found_goodput, by_rate, sorted(outside), error.why if error else "")


def pooled(runs: Runs) -> RatePoint:
    """Return the point of the attainment curve that several seeds give together."""
    (point,) = merged(_points(runs))
    return point


def _points(runs: Runs) -> list[RatePoint]:
    """Return the point of each run.

    A run that was stopped is lost, and counts as if it had gone on as it was: with as many requests
    as the others, or it would say less the worse it is.
    """
    most_sent = max(run.score.sent for run in runs)
    return [
        _longer(run.point, most_sent / run.score.sent) if run.stopped_early else run.point
        for run in runs
    ]


def _longer(point: RatePoint, times: float) -> RatePoint:
    counts = point.kinds.items()
    return RatePoint(point.rate, {k: (round(times * m), round(times * n)) for k, (m, n) in counts})
