"""Where modes cross: which of them keeps most of a promise, from which load on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from pdserve.commands.bench.compare.goodput import RatePoint, merged

ALIKE = 0.03  # attainments that differ by less are alike
_LEAST = 0.8  # of the best one: loads of which less is kept are of no interest
_NUM_RATES = 400

Curve = list[tuple[float, float]]
"""(rate, attainment of the worst kind), by rate; falling."""


class Band(msgspec.Struct, frozen=True):
    """From this rate on, up to the next band, these keep most: all others keep less."""

    rate: float  # requests/s
    best: list[str]


def curve_of(points: Iterable[RatePoint]) -> Curve:
    """Return a falling curve: what is kept at a higher rate is kept at a lower one."""
    by_rate = merged(points)
    shares = np.array([point.attainment for point in by_rate])
    falling = np.maximum.accumulate(shares[::-1])[::-1]
    return [(point.rate, float(y)) for point, y in zip(by_rate, falling, strict=True)]


def bands(curves: Mapping[str, Curve]) -> list[Band]:
    """Return the bands of some modes, linear between their rates.

    Outside of a mode's rates it keeps what it keeps at the nearest of them.
    """
    known = {name: curve for name, curve in curves.items() if curve}
    if not known:
        return []
    ends = [rate for curve in known.values() for rate in (curve[0][0], curve[-1][0])]
    rates = np.geomspace(min(ends), max(ends), _NUM_RATES)
    shares = {
        name: np.interp(rates, [rate for rate, _ in curve], [share for _, share in curve])
        for name, curve in known.items()
    }
    found: list[Band] = []
    for place, rate in enumerate(rates.tolist()):
        at = {name: float(share[place]) for name, share in shares.items()}
        most = max(at.values())
        if most < _LEAST:
            break
        best = [name for name, share in at.items() if share >= most - ALIKE]
        if not found or found[-1].best != best:
            found.append(Band(rate, best))
    return found
