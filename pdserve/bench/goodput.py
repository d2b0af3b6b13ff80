"""Goodput: the highest rate at which enough requests of every kind meet both promises, and how
sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

_RESAMPLES = 2000
_INTERVAL = (5, 95)  # percent

Where = Literal["crossing", "above the rates", "below the rates"]


@dataclass(frozen=True, slots=True)
class RatePoint:
    """What one run contributes."""

    rate: float  # requests a second
    met: int
    sent: int

    @property
    def attainment(self) -> float:
        """The share that met both promises."""
        return self.met / self.sent


class Goodput(msgspec.Struct, frozen=True):
    """Requests a second, of the whole cluster."""

    rate: float  # "above": the highest rate measured; "below": 0
    where: Where
    low: float  # from 5 to 95 % of resampled runs lie between these
    high: float


def crossing(
    rates: Sequence[float], attainments: Sequence[float], target: float
) -> tuple[float, Where]:
    """Where attainment first falls below `target`: linear between the two rates around it.

    As in DistServe's figures. Rates are ascending. What attainment does after that does not count.
    """
    if attainments[0] < target:
        return 0.0, "below the rates"
    points = list(zip(rates, attainments, strict=True))
    for (rate, above), (next_rate, below) in pairwise(points):
        if below < target:
            return rate + (above - target) / (above - below) * (next_rate - rate), "crossing"
    return rates[-1], "above the rates"


def goodput(points: Sequence[RatePoint], target: float, seed: int) -> Goodput:
    """Of runs at different rates, with a bootstrapped interval: each run's requests drawn anew.

    The interval knows nothing of what runs have in common, such as a machine slow for all of them.
    """
    points = sorted(points, key=lambda point: point.rate)
    rates = [point.rate for point in points]
    rate, where = crossing(rates, [point.attainment for point in points], target)
    rng = np.random.default_rng(seed)
    sent = [point.sent for point in points]
    drawn = rng.binomial(sent, [point.attainment for point in points], (_RESAMPLES, len(points)))
    resampled = [crossing(rates, attainments, target)[0] for attainments in drawn / sent]
    low, high = np.percentile(resampled, _INTERVAL)
    return Goodput(rate, where, float(low), float(high))
