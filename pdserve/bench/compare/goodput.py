"""Goodput and its uncertainty.

Goodput is the highest rate at which enough requests of every kind meet both targets.
"""

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
    """The result of one run: a point of the attainment curve."""

    rate: float  # requests per second
    met: int
    sent: int

    @property
    def attainment(self) -> float:
        """Share of requests that met both targets."""
        return self.met / self.sent


class Goodput(msgspec.Struct, frozen=True):
    """Goodput of the whole cluster, in requests per second."""

    rate: float  # "above the rates": the highest rate measured; "below": 0
    where: Where
    low: float  # 5th and 95th percentile of the resampled results
    high: float


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


def goodput(points: Sequence[RatePoint], target: float, seed: int) -> Goodput:
    """Compute goodput from runs at different rates, with a bootstrapped interval.

    The bootstrap draws each run's requests anew. The interval does not cover what the runs have in
    common, such as a machine that was slow for all of them.
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
