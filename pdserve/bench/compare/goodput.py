"""Goodput, its uncertainty, and which rates to measure for it.

Goodput is the highest rate at which enough requests of every kind meet both targets. Capacities are
not known beforehand, and runs at a wrongly estimated rate are wasted. So every run counts: rates
grow by a factor, a larger one as long as all requests are in time, until every mode has failed
once. Then the widest gap between a rate at which the target was met and the next one at which it
was not is halved, until it is small; and the rates around the least certain crossing are measured
again with other requests, until all are certain enough or there is no time left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

_RESAMPLES = 2000
_PRIOR = 0.5  # of requests in time, and of late ones: Jeffreys' prior of a share
_INTERVAL = (5, 95)  # percent
GROWTH = 1.5  # factor from one rate to the next
_LEAP = 2.0  # factor as long as all requests of all modes were in time
_CLOSE = 1.08  # rates closer than this factor are not distinguished
_LOWEST = 0.3  # of the first rate: goodput below it is not worth finding

Draws: TypeAlias = npt.NDArray[np.float64]
"""[_RESAMPLES] of what a goodput may be: 0 where it is below the rates, infinite where above."""

Where = Literal["crossing", "above the rates", "below the rates"]


@dataclass(frozen=True, slots=True)
class RatePoint:
    """The result of one run: a point of the attainment curve."""

    rate: float  # requests per second
    kinds: Mapping[str, tuple[int, int]]  # of requests |-> (in time, sent)

    @property
    def attainment(self) -> float:
        """Share of requests that met both targets, of the worst kind."""
        met, sent = self.worst
        return met / sent

    @property
    def worst(self) -> tuple[int, int]:
        """The kind of which the smallest share was in time: (in time, sent)."""
        return min(self.kinds.values(), key=lambda kind: kind[0] / kind[1])

    @property
    def is_perfect(self) -> bool:
        """Whether all requests met both targets."""
        return all(met == sent for met, sent in self.kinds.values())

    @property
    def num_sent(self) -> int:
        """Requests of all kinds."""
        return sum(sent for _, sent in self.kinds.values())


class Goodput(msgspec.Struct, frozen=True):
    """Goodput of the whole cluster, in requests per second."""

    rate: float  # "above the rates": the highest rate measured; "below": 0
    where: Where
    low: float  # 5th and 95th percentile of what it may be; 0: below the rates
    high: float | None  # None: above the rates

    @property
    def text(self) -> str:
        """For people: "3.2", or "3.2 or more" above the rates."""
        return f"{self.rate:.3g}" + " or more" * (self.where == "above the rates")


def crossing(
    rates: Sequence[float], attainments: Sequence[float], target: float
) -> tuple[float, Where]:
    """Return where attainment first falls below `target`: linear between the two rates around it.

    As in DistServe's figures. Rates are ascending. Attainment beyond the first crossing is ignored.
    """
    if attainments[0] < target:
        return 0.0, "below the rates"
    points = list(zip(rates, attainments, strict=True))
    for (rate, above), (next_rate, below) in pairwise(points):
        if below < target:
            return rate + (above - target) / (above - below) * (next_rate - rate), "crossing"
    return rates[-1], "above the rates"


def goodput(
    points: Sequence[RatePoint], target: float, seed: int, dispersion: float = 1.0
) -> Goodput:
    """Compute goodput from runs at different rates, with an interval.

    The shares that each run may have shown by chance are drawn from their posterior distribution
    (Jeffreys' prior), so four of four requests in time are not taken for certainty. The interval
    takes so many requests as one as `dispersion` says: those that are late tend to come together
    (`verdict.dispersion`). It does not cover what all runs have in common.
    """
    points = merged(points)
    rates = [point.rate for point in points]
    rate, where = crossing(rates, [point.attainment for point in points], target)
    low, high = _interval(_resampled(points, target, seed, dispersion), rates)
    return Goodput(rate, where, min(low, rate), high if high is None else max(high, rate))


def drawn(points: Sequence[RatePoint], target: float, seed: int, dispersion: float = 1.0) -> Draws:
    """Return what the goodput may be. Arguments as for `goodput`."""
    resampled = _resampled(merged(points), target, seed, dispersion)
    return np.array([inf if where == "above the rates" else rate for rate, where in resampled])


def merged(points: Iterable[RatePoint]) -> list[RatePoint]:
    """Return one point for each rate, ascending: runs at the same rate are one longer run.

    Not every run of a trace has requests of a kind that is rare there.
    """
    by_rate: dict[float, dict[str, tuple[int, int]]] = {}
    for point in points:
        kinds = by_rate.setdefault(point.rate, {})
        for name, (met, sent) in point.kinds.items():
            met_before, sent_before = kinds.get(name, (0, 0))
            kinds[name] = met_before + met, sent_before + sent
    return [RatePoint(rate, dict(sorted(kinds.items()))) for rate, kinds in sorted(by_rate.items())]


def _resampled(
    points: Sequence[RatePoint], target: float, seed: int, dispersion: float
) -> list[tuple[float, Where]]:
    rng = np.random.default_rng(seed)
    shares = np.transpose([_draw(point, rng, dispersion) for point in points])
    # What is kept at a higher rate is kept at a lower one, so more low rates add no doubt.
    shares = np.maximum.accumulate(shares[:, ::-1], axis=1)[:, ::-1]  # [_RESAMPLES, rates]
    rates = [point.rate for point in points]
    return [crossing(rates, attainments, target) for attainments in shares.tolist()]


def _draw(point: RatePoint, rng: np.random.Generator, dispersion: float) -> Draws:
    """Draw attainments of the worst kind, which may be another one each time. [_RESAMPLES]"""
    met, sent = np.array([*point.kinds.values()]).T / dispersion
    shares = rng.beta(met + _PRIOR, sent - met + _PRIOR, (_RESAMPLES, len(met)))
    worst: Draws = shares.min(axis=1)
    return worst


def _interval(
    resampled: Sequence[tuple[float, Where]], rates: Sequence[float]
) -> tuple[float, float | None]:
    """Return the percentiles of crossings, of which those beyond the rates are only bounds."""
    ordered = sorted(inf if where == "above the rates" else rate for rate, where in resampled)
    low, high = (ordered[round(share / 100 * (len(ordered) - 1))] for share in _INTERVAL)
    return min(low, rates[-1]), None if high == inf else max(high, rates[0])


def next_rate(
    curves: Sequence[Sequence[RatePoint]],
    start: float,
    target: float,
    width: float = inf,
    dispersion: float = 1.0,
) -> float | None:
    """Return the rate to measure next, for all modes; None if another run would tell little.

    Args:
        curves: the results of each mode so far, all at the same rates.
        start: the first rate.
        target: the attainment that counts as met.
        width: of an interval, as a ratio of its ends, that is certain enough.
        dispersion: as for `goodput`.
    """
    sorted_curves = [merged(curve) for curve in curves if curve]
    if not sorted_curves:
        return start
    lowest = min(curve[0].rate for curve in sorted_curves)
    highest = max(curve[-1].rate for curve in sorted_curves)
    if any(all(p.attainment >= target for p in curve) for curve in sorted_curves):
        leaps = all(curve[-1].is_perfect for curve in sorted_curves)
        return highest * (_LEAP if leaps else GROWTH)
    if any(curve[0].attainment < target for curve in sorted_curves) and lowest > start * _LOWEST:
        return lowest / GROWTH
    brackets = [bracket for curve in sorted_curves if (bracket := _bracket(curve, target))]
    if not brackets:
        return None
    low, high = max(brackets, key=lambda bracket: bracket[1] / bracket[0])
    return (
        (low * high) ** 0.5
        if high / low > _CLOSE
        else _again(sorted_curves, target, width, dispersion)
    )


def _again(
    curves: Sequence[Sequence[RatePoint]], target: float, width: float, dispersion: float
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
    bracket = _bracket(curves[widest], target)
    if widths[widest] <= width or bracket is None:
        return None
    beside = [point for point in curves[widest] if point.rate in bracket]
    return min(beside, key=lambda point: point.num_sent).rate


def _bracket(curve: Sequence[RatePoint], target: float) -> tuple[float, float] | None:
    """Return the two rates around the first crossing."""
    for earlier, later in pairwise(curve):
        if earlier.attainment >= target > later.attainment:
            return earlier.rate, later.rate
    return None
