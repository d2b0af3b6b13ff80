"""What some runs leave possible of a goodput, by how far each was from keeping the promise.

The *scale* of a run is the factor on both targets with which enough requests of every kind would
have been in time: 1 at the goodput, and more above it. Its logarithm rises about in proportion to
that of the rate, so a line through the runs whose scales are near 1 passes 0 at the goodput. That
uses every run around it, while shares of requests in time are all alike at rates that are kept, and
jump beside the goodput. By how much runs are beside their lines is pooled over all servers: chance,
what else the machine does, and how far from lines the curves are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, log
from typing import Final, NamedTuple

import numpy as np

from pdserve.commands.bench.compare.goodput import RESAMPLES, Draws

_MOST: Final = 4.0  # a scale; one of requests that never ended is no more
_NEAR: Final = log(2.0)  # logarithms of scales that belong to the line
_BEYOND: Final = log(1.5)  # how far beyond the rates a line tells anything
_LEAST_SLOPE: Final = 0.25  # of lines: more requests take longer
_GUESS: Final = 0.2  # deviation of runs from a line,
_GUESS_COUNTS: Final = 4.0  # which counts as so many degrees of freedom


class ScaledRun(NamedTuple):
    """A run at a rate."""

    rate: float  # requests per second
    scale: float | None  # None: too many requests did not end

    @property
    def log_scale(self) -> float:
        """At most that of `_MOST`."""
        return log(_MOST if self.scale is None else min(self.scale, _MOST))


class Spread(NamedTuple):
    """How far runs are from the lines through them."""

    deviation: float  # standard deviation of the logarithms of their scales
    freedom: float  # degrees of freedom from which it is known

    @classmethod
    def of(cls, servers: Iterable[Sequence[ScaledRun]]) -> Spread:
        """Of the runs of each server."""
        squares, freedom = _GUESS_COUNTS * _GUESS**2, _GUESS_COUNTS
        for runs in servers:
            line = _Line.through(_near(runs))
            if line is not None:
                squares += line.squares
                freedom += line.num_runs - 2
        return cls((squares / freedom) ** 0.5, freedom)


class _Line(NamedTuple):
    """The least-squares line of the logarithms of scales over those of rates."""

    middle: float  # mean of the logarithms of rates,
    height: float  # the line there,
    slope: float
    num_runs: int
    width: float  # sum of the squared distances of the rates from their middle
    squares: float  # of how far runs are from the line

    @classmethod
    def through(cls, runs: Sequence[ScaledRun]) -> _Line | None:
        """None: they are at less than two rates."""
        if len({run.rate for run in runs}) < 2:
            return None
        rates = np.log([run.rate for run in runs])
        logs = np.array([run.log_scale for run in runs])
        middle, height = float(rates.mean()), float(logs.mean())
        width = float(((rates - middle) ** 2).sum())
        slope = float(((rates - middle) * (logs - height)).sum()) / width
        beside = logs - height - slope * (rates - middle)
        return cls(middle, height, slope, len(runs), width, float((beside**2).sum()))


def drawn(runs: Sequence[ScaledRun], spread: Spread, seed: int) -> Draws:
    """Return what the goodput may be, from the posterior distribution of the line."""
    rng = np.random.default_rng(seed)
    wrong = spread.deviation * (spread.freedom / rng.chisquare(spread.freedom, RESAMPLES)) ** 0.5
    near = _near(runs)
    line = _Line.through(near)
    if line is None:  # all are on one side
        beside = near[0].log_scale + wrong * rng.standard_normal(RESAMPLES) / len(near) ** 0.5
        one_side: Draws = np.where(beside > 0, 0.0, inf)
        return one_side
    height = line.height + wrong * rng.standard_normal(RESAMPLES) / line.num_runs**0.5
    slope = line.slope + wrong * rng.standard_normal(RESAMPLES) / line.width**0.5
    found = line.middle - height / slope.clip(_LEAST_SLOPE)
    rates = [log(run.rate) for run in runs]
    found[found < min(rates) - _BEYOND] = -inf
    found[found > max(rates) + _BEYOND] = inf
    goodputs: Draws = np.exp(found)
    return goodputs


def _near(runs: Sequence[ScaledRun]) -> list[ScaledRun]:
    """Return the runs at rates at which scales were near 1, and at those beside the crossing."""
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        by_rate.setdefault(run.rate, []).append(run.log_scale)
    means = {rate: sum(logs) / len(logs) for rate, logs in sorted(by_rate.items())}
    near = {rate for rate, mean in means.items() if abs(mean) <= _NEAR}
    near |= set([rate for rate, mean in means.items() if mean <= 0][-1:])
    near |= set([rate for rate, mean in means.items() if mean > 0][:1])
    return [run for run in runs if run.rate in near]
