"""Goodput and its uncertainty.

Goodput is the highest rate at which enough requests of every kind meet both targets: the lowest of
the rates at which the kinds cross the target. What chance does to each kind is drawn for that kind
alone, and the lowest is taken of draws of equal rank. The lowest of independent draws would be
lower the more kinds cross at about the same rate: that of the shares that were seen is already too
low there, and that of draws around it is so once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
_PRIOR = 0.5  # of requests in time, and of late ones: Jeffreys' prior of a share
_INTERVAL = (5, 95)  # percent

Floats: TypeAlias = npt.NDArray[np.float64]

Draws: TypeAlias = Floats
"""[RESAMPLES] of what a goodput may be: 0 where it is below the rates, infinite where above."""

Dispersion: TypeAlias = Mapping[str, float]
"""Kind |-> how many requests count as one, since late ones come together; 1 if not named."""

INDEPENDENT: Final[Dispersion] = MappingProxyType({})

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


def crossing(points: Iterable[RatePoint], target: float) -> tuple[float, Where]:
    """Return where the attainment of some kind first falls below `target`, and whether it does.

    Linear between the two rates around it, as in DistServe's figures, on falling curves: what is
    kept at a higher rate is kept at a lower one. Above the rates, the highest of them; below, 0.
    """
    points = merged(points)
    rate = min(
        _crossings(curve.rates, curve.falling, target).item() for curve in _curves(points).values()
    )
    if rate == inf:
        return points[-1].rate, "above the rates"
    return rate, "crossing" if rate else "below the rates"


def attainments(points: Sequence[RatePoint]) -> list[float]:
    """Return the attainment of the worst kind at each rate, on falling curves.

    `points`: as `merged` returns them.
    """
    worst = {point.rate: 1.0 for point in points}
    for curve in _curves(points).values():
        for rate, share in zip(curve.rates.tolist(), curve.falling[0].tolist(), strict=True):
            worst[rate] = min(worst[rate], share)
    return list(worst.values())


def goodput(
    points: Sequence[RatePoint], target: float, seed: int, dispersion: Dispersion = INDEPENDENT
) -> Goodput:
    """Compute goodput from runs at different rates, with an interval.

    The interval does not cover what all runs have in common. `dispersion`: as `verdict.dispersion`
    finds it.
    """
    return bounded(points, target, drawn(points, target, seed, dispersion))


def bounded(points: Iterable[RatePoint], target: float, draws: Draws) -> Goodput:
    """Compute goodput from runs at different rates, with the interval of what it may be."""
    points = merged(points)
    rate, where = crossing(points, target)
    low, high = np.percentile(draws, _INTERVAL, method="nearest").tolist()
    return Goodput(
        rate,
        where,
        low=min(low, rate),
        high=None if high == inf else max(high, rate, points[0].rate),
    )


def drawn(
    points: Iterable[RatePoint], target: float, seed: int, dispersion: Dispersion = INDEPENDENT
) -> Draws:
    """Return what the goodput may be. Arguments as for `goodput`.

    Shares of each kind are drawn from their posterior distribution, so four of four requests in
    time are not taken for certainty. Of the kinds' draws, those of equal rank belong together. A
    bound that is above the goodput is so for the kind that decides, whatever the others do; but one
    below it may come from any kind, so they divide the upper tail among them (Bonferroni).
    """
    rng = np.random.default_rng(seed)
    of_kinds = np.sort(
        [
            _crossings(curve.rates, curve.drawn(rng, dispersion.get(kind, 1.0)), target)
            for kind, curve in _curves(merged(points)).items()
        ]
    )
    ranks = np.linspace(0, 1, RESAMPLES)
    upper = (2 * ranks - 1).clip(0)  # from 0 in the middle to 1 at the end of the tail
    ranks = 1 - (1 - ranks) * (1 - upper * (1 - 1 / len(of_kinds)))
    places = np.round(ranks * (RESAMPLES - 1)).astype(int)
    return rng.permutation(of_kinds[:, places].min(axis=0))


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


@dataclass(frozen=True, slots=True)
class _Curve:
    """One kind of requests at the rates at which there were any. All arrays: [rates]."""

    rates: Floats  # ascending
    met: Floats  # requests
    late: Floats

    @property
    def falling(self) -> Floats:
        """The falling curve that fits best. [1, rates]"""
        return _falling(self.met[None], self.late[None])

    def drawn(self, rng: np.random.Generator, dispersion: float) -> Floats:
        """Draw falling curves. [RESAMPLES, rates]

        A share of gamma variables is one of a beta distribution, also of their sums; and the prior
        counts once in each sum, however many rates it is of.
        """
        size = (RESAMPLES, len(self.rates))
        met, late = (rng.standard_gamma(of / dispersion, size) for of in (self.met, self.late))
        met_before, late_before = rng.standard_gamma(_PRIOR, (2, RESAMPLES, 1))
        return _falling(met, late, met_before, late_before)


def _curves(points: Sequence[RatePoint]) -> dict[str, _Curve]:
    kinds: dict[str, list[tuple[float, float, float]]] = {}
    for point in points:
        for name, (met, sent) in point.kinds.items():
            kinds.setdefault(name, []).append((point.rate, met, sent - met))
    return {name: _Curve(*np.array(of, dtype=np.float64).T) for name, of in kinds.items()}


def _falling(
    met: Floats, late: Floats, met_before: Floats | float = 0.0, late_before: Floats | float = 0.0
) -> Floats:
    """Return falling shares (isotonic regression, by its min-max formula). [curves, rates]

    Args:
        met: requests in time. [curves, rates]
        late: late ones. [curves, rates]
        met_before: such requests that count in each share. [curves, 1]
        late_before: late ones that do.
    """
    shares = np.full(met.shape, inf)
    for first in range(met.shape[1]):
        of_met = met[:, first:].cumsum(axis=1) + met_before
        of_late = late[:, first:].cumsum(axis=1) + late_before
        up_to = of_met / (of_met + of_late)  # from `first` up to each rate
        largest = np.maximum.accumulate(up_to[:, ::-1], axis=1)[:, ::-1]
        shares[:, first:] = np.minimum(shares[:, first:], largest)
    return shares


def _crossings(rates: Floats, shares: Floats, target: float) -> Draws:
    """Return where each of some falling curves ([curves, rates]) crosses `target`. [curves]"""
    kept = (shares >= target).sum(axis=1)
    inside = (kept > 0) & (kept < len(rates))
    found = np.where(kept == 0, 0.0, inf)
    curve, after = np.flatnonzero(inside), kept[inside]
    above, below = shares[curve, after - 1], shares[curve, after]
    way = (above - target) / (above - below)
    found[inside] = rates[after - 1] + way * (rates[after] - rates[after - 1])
    return found
