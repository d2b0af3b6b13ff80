"""What a comparison has shown, in words, with its certainty.

Goodputs are compared by their ratio, drawn from what the runs leave possible (`goodput.drawn`). The
first server is measured twice at each rate, as if it were two (A/A): what those differ by is chance
and the machine, and no smaller difference between others is believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil, exp, inf, log

import msgspec
import numpy as np

from pdserve.commands.bench.compare.goodput import Draws, RatePoint

_INTERVAL = (2.5, 97.5)  # percent
# What ends the measuring of a pair is looked at after every round, and once it may be wrong by
# chance. With ten looks, the wider interval is wrong as seldom as the other one is with one look
# (Pocock, 1977).
_LOOKED_AT_OFTEN = (0.5, 99.5)
_ALIKE = 1.05  # two whose ratio is within this are not worth telling apart
_SURE = 0.975  # share of the draws in which one is the better, from which on that is certain
_Z = 1.96
_SMALL = 1.1  # the ratio that a run should be able to tell from 1
_MOST_TIMES = 100


class Ratio(msgspec.Struct, frozen=True):
    """A ratio of two goodputs: its median, and 95 % of what it may be."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(
        cls, some: Draws, others: Draws, interval: tuple[float, float] = _INTERVAL
    ) -> Ratio | None:
        """Of draws of both; None if either may well be beyond the rates."""
        if not all(0 < np.median(draws) < inf for draws in (some, others)):
            return None
        both = np.concatenate([some, others])
        within = both[(both > 0) & (both < inf)]
        least, most = within.min(), within.max()
        logs = np.log(some.clip(least, most)) - np.log(others.clip(least, most))
        low, middle, high = np.exp(np.percentile(logs, (interval[0], 50, interval[1])))
        return cls(float(middle), float(low), float(high))

    @property
    def differs(self) -> bool:
        """Whether 1 is outside of the interval."""
        return self.low > 1 or self.high < 1

    @property
    def text(self) -> str:
        """As "1.30x, 95 % interval 1.10 to 1.50"."""
        return f"{self.middle:.2f}x, 95 % interval {self.low:.2f} to {self.high:.2f}"


class Verdict(msgspec.Struct, frozen=True):
    """One server beside another."""

    server: str
    other: str
    ratio: Ratio | None  # of their goodputs
    is_certain: bool  # they differ by more than chance, and by more than a server from itself
    text: str


class Noise(msgspec.Struct, frozen=True):
    """A server beside itself."""

    server: str
    ratio: Ratio | None
    deviation: float = 0.0  # of equal runs: of the logarithm of what they kept of the promise

    @property
    def factor(self) -> float:
        """The ratio, at least 1, that is nothing but noise."""
        return 1.0 if self.ratio is None else exp(abs(log(self.ratio.middle)))

    @property
    def text(self) -> str:
        """For people."""
        if self.ratio is None:
            return f"A/A: {self.server} could not be compared with itself."
        said = f"A/A: {self.server} beside itself: {self.ratio.text}"
        if self.ratio.differs:
            said += "; the machine was not the same for both, so no smaller difference is believed"
        if self.deviation:
            said += (
                f". Runs at one rate kept the promise times a factor that varied by "
                f"{self.deviation:.0%} (standard deviation), by which the intervals are so wide"
            )
        return said + "."


def undecided(draws: Mapping[str, Draws], noise: Noise | None) -> set[str]:
    """Return the servers that further runs would tell something of: which is best, or by how much.

    Another one is done with if it is worse for certain, or as good but for a twentieth.
    """
    best, *others = _ordered(draws)
    least_times = noise.factor if noise else 1.0
    open_ones = {name for name in others if not _is_decided(draws[best], draws[name], least_times)}
    return {best, *open_ones} if open_ones else set()


def _is_decided(best: Draws, other: Draws, least_times: float) -> bool:
    ratio = Ratio.of(best, other, _LOOKED_AT_OFTEN)
    if ratio is None:  # at least one is beyond the rates
        return bool(np.mean(best > other) >= _LOOKED_AT_OFTEN[1] / 100)
    is_worse = ratio.low > 1 and ratio.middle > least_times
    return is_worse or 1 / _ALIKE <= ratio.low <= ratio.high <= _ALIKE


def _ordered(draws: Mapping[str, Draws]) -> list[str]:
    """The best first, by the medians."""
    return sorted(draws, key=lambda name: float(np.median(draws[name])), reverse=True)


def verdicts(
    draws: Mapping[str, Draws], noise: Noise | None, rates: Mapping[str, Sequence[float]]
) -> list[Verdict]:
    """Compare the best server with each other one. The best comes from the medians.

    Args:
        draws: what the goodput of each may be.
        noise: the first server beside itself, if that was measured.
        rates: at which each was measured.
    """
    best, *others = _ordered(draws)
    return [_verdict(best, other, draws, noise, rates) for other in others]


def _verdict(
    best: str,
    other: str,
    draws: Mapping[str, Draws],
    noise: Noise | None,
    rates: Mapping[str, Sequence[float]],
) -> Verdict:
    ratio, least_times = Ratio.of(draws[best], draws[other]), noise.factor if noise else 1.0
    if ratio is None:
        return _beyond_rates(best, other, draws, least_times, rates)
    is_certain = ratio.differs and ratio.middle > least_times
    if not is_certain:
        return Verdict(best, other, ratio, False, _cannot_tell(best, other, ratio))
    return Verdict(best, other, ratio, True, f"{_advice(best, other)}{best} keeps {ratio.text}")


def _beyond_rates(
    best: str,
    other: str,
    draws: Mapping[str, Draws],
    least_times: float,
    rates: Mapping[str, Sequence[float]],
) -> Verdict:
    """Compare two of which at least one seems to be beyond the rates: there is no ratio."""
    if np.median(draws[best]) <= 0:
        told = "none of them is shown to keep the promise at a rate that was measured"
        return Verdict(best, other, None, False, told)
    if np.median(draws[other]) == inf:
        told = (
            f"this run cannot tell {best} from {other}: both keep the promise at all rates that "
            "were measured; try higher ones"
        )
        return Verdict(best, other, None, False, told)
    if np.median(draws[other]) <= 0:
        told = f"{best} keeps the promise; {other} at no rate that was measured"
    else:
        told = f"{best} keeps the promise at all rates that were measured, unlike {other}"
    most, least = max(rates[best]), min(rates[other])
    ratios = draws[best].clip(0, most) / draws[other].clip(least)
    times = float(np.percentile(ratios, _INTERVAL[0]))
    is_better = bool(np.mean(draws[best] > draws[other]) >= _SURE)
    is_certain = is_better and times >= least_times
    if not is_certain:
        told = f"it seems that {told}, but this run cannot tell"
    elif times > 1:
        told += f", so {best} keeps more than {times:.1f}x (97.5 %)"
    return Verdict(best, other, None, is_certain, told)


def _advice(best: str, other: str) -> str:
    match best, other:
        case "colocated", "disaggregated":
            return "do not disaggregate this: "
        case "disaggregated", "colocated":
            return "disaggregate this: "
    return f"against {other}: "


def _cannot_tell(best: str, other: str, ratio: Ratio) -> str:
    """How much longer a run would have to be to tell a small difference."""
    half = max(log(ratio.high / ratio.low) / 2, 1e-9)
    times = ceil((half / log(_SMALL)) ** 2)
    told = f"this run cannot tell {best} from {other} ({ratio.text})"
    if 1 < times <= _MOST_TIMES:
        told += f"; about {times} times as many requests would tell a difference of a tenth"
    return told


def dispersion(servers: Iterable[Sequence[RatePoint]]) -> dict[str, float]:
    """Return, by kind, how much more shares vary between equal runs than by independent requests.

    At least 1, and more if few runs tell. Runs of one server at one rate are equal. The more
    requests of a kind a run has, the more of them come together.
    """
    equal: dict[str, list[list[tuple[int, int]]]] = {}
    for runs in servers:
        for kind, group in _equal(runs):
            equal.setdefault(kind, []).append(group)
    squares = {kind: _squares(groups) for kind, groups in equal.items()}
    unsure = _unsure(sum(freedom for _, freedom in squares.values()))
    return {kind: ratio * unsure if freedom else 1.0 for kind, (ratio, freedom) in squares.items()}


def _squares(groups: Iterable[Sequence[tuple[int, int]]]) -> tuple[float, int]:
    """Return (variance over that of independent requests, degrees of freedom) of one kind.

    `groups`: (in time, sent) of equal runs.
    """
    squares, independent, freedom = 0.0, 0.0, 0
    for group in groups:
        met, sent = (sum(numbers) for numbers in zip(*group, strict=True))
        share = met / sent
        if len(group) < 2 or not 0 < share < 1:
            continue  # where all or none are in time there is nothing to see
        squares += sum((m - s * share) ** 2 / s for m, s in group)
        independent += (len(group) - 1) * share * (1 - share)
        freedom += len(group) - 1
    return max(1.0, squares / independent) if freedom else 1.0, freedom


def _equal(points: Sequence[RatePoint]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield each kind of requests with (in time, sent) of the runs at each rate."""
    groups: dict[tuple[float, str], list[tuple[int, int]]] = {}
    for point in points:
        for kind, counts in point.kinds.items():
            groups.setdefault((point.rate, kind), []).append(counts)
    for (_, kind), group in groups.items():
        yield kind, group


def _unsure(freedom: int) -> float:
    """A variance is known no better than from so many runs: of Student's t, squared, over normal.

    The first terms of the expansion of the 97.5 % quantile. A few long waits make most requests
    late, so squares of runs vary about twice as much as those of normal numbers.
    """
    known = max(1.0, freedom / 2)
    return ((_Z + 2.37 / known + 2.82 / known**2) / _Z) ** 2
