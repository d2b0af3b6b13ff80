"""The goodput of a deployment: rates are bisected until the crossing is enclosed closely."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.bench.compare.goodput import Goodput, RatePoint, goodput, merged
from pdserve.bench.compare.verdict import dispersion
from pdserve.simulation.predict.deployment import Result

GROWTH = 1.5  # factor between rates until the crossing is enclosed
_MOST = 24  # rates

Runs = Sequence[Result]
"""The runs at one rate, one per seed."""


def find_goodput(
    runs_at: Callable[[float], Runs], start: float, target: float, close: float
) -> tuple[Goodput, list[Runs]]:
    """Return the goodput, and the runs behind it by rate.

    Args:
        runs_at: simulates a rate.
        start: the first rate, per second.
        target: share of the requests of each kind that must be in time.
        close: factor between the two rates around the crossing, at which the search ends.
    """
    found: dict[float, Runs] = {}
    low, high, rate = 0.0, 0.0, start
    while len(found) < _MOST and not (low and high and high <= low * close):
        found[rate] = runs_at(rate)
        if pooled(found[rate]).attainment >= target:
            low = rate
        else:
            high = rate
        if not high:
            rate = low * GROWTH
        elif not low:
            rate = high / GROWTH
        else:
            rate = (low * high) ** 0.5
    by_rate = [found[rate] for rate in sorted(found)]
    points = [point for runs in by_rate for point in _points(runs)]
    return goodput(points, target, 0, dispersion([points])), by_rate


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
