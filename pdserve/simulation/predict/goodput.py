"""The goodput of a deployment: rates are bisected until the crossing is enclosed closely."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.bench.compare.goodput import Goodput, RatePoint, goodput
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
    points = [pooled(runs) for runs in by_rate]
    return goodput(points, target, seed=0), by_rate


def pooled(runs: Runs) -> RatePoint:
    """Return the point of the attainment curve that several seeds give together.

    A run that was stopped is lost, and counts as if it had gone on as it was: with as many requests
    as the others, or it would say less the worse it is.
    """
    kinds: dict[str, tuple[int, int]] = {}
    most_sent = max(run.score.sent for run in runs)
    for run in runs:
        times = most_sent / run.score.sent if run.stopped_early else 1.0
        for name, kind in run.score.kinds.items():
            met, sent = kinds.get(name, (0, 0))
            kinds[name] = met + round(times * kind.met), sent + round(times * kind.sent)
    return RatePoint(runs[0].rate, dict(sorted(kinds.items())))
