"""One deployment under one load: what was predicted of it, and what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from pdserve.commands.bench.compare.goodput import RatePoint
from pdserve.commands.bench.load.slo_score import Score
from pdserve.commands.simulation.predict.parts import Parts

_OTHERS = 0.1  # share of the cores, from which on others' processes are what is measured
_DRIFT = 0.1  # between the paces before and after a run, from which on nobody knows that in it
_SHARES = ("attainment", "attainment_low", "attainment_high")

Kinds = Mapping[str, tuple[int, int]]
"""Kind of requests |-> (in time, sent) of a run."""


class Figures(msgspec.Struct, frozen=True):
    """What is compared of one run; latencies in milliseconds, None if no request has one."""

    attainment: float
    attainment_low: float  # 95 % interval
    attainment_high: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None

    @classmethod
    def of(cls, score: Score) -> Figures:
        """Return a run's figures."""
        ttft, tpot = score.ttft_ms, score.tpot_ms
        return cls(
            score.attainment,
            score.attainment_low,
            score.attainment_high,
            ttft.p50,
            ttft.p99,
            tpot.p50,
            tpot.p99,
        )

    @classmethod
    def between(cls, scores: Sequence[Score]) -> Figures:
        """Return what several runs with the same requests tell of another one.

        Attainments are means. Latencies are medians: those of a run depend on whether one request
        more was too late to be served first, so runs lie on two sides of their mean.
        """
        figures = [msgspec.structs.asdict(cls.of(score)) for score in scores]
        between: dict[str, Any] = {}
        for name in figures[0]:
            of_runs = [run[name] for run in figures]
            between[name] = statistics.fmean(of_runs) if name in _SHARES else _median(of_runs)
        return cls(**between)


def _median(figures: Sequence[float | None]) -> float | None:
    known = known_of(figures)
    return statistics.median(known) if known else None


def known_of(figures: Iterable[float | None]) -> list[float]:
    """Return all of them; none if one is missing, since a run without it is no better."""
    all_of_them = list(figures)
    known = [figure for figure in all_of_them if figure is not None]
    return known if len(known) == len(all_of_them) else []


def points_of(rates: Iterable[tuple[float, Kinds, bool]]) -> list[RatePoint]:
    """Return the points of a curve; of each rate it is given whether it tells of the nodes.

    Where none does, all of them: nothing else is known.
    """
    found = list(rates)
    known = [(rate, kinds) for rate, kinds, is_known in found if is_known]
    return [RatePoint(*point) for point in known or [(rate, kinds) for rate, kinds, _ in found]]


def _limit(kept_up: bool, others: float, drift: float) -> str:
    if not kept_up:
        return "client's limit"
    if others > _OTHERS:
        return "others' load"
    return "another pace" if drift > _DRIFT else ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment under one load, at several rates."""

    load: str
    ttft_s: float  # what was promised
    tpot_s: float
    deployment: str
    rates: list[float]  # per second, ascending
    predicted: list[Figures]
    predicted_kinds: list[list[Kinds]]  # of each rate: of each of the simulated runs
    predicted_ttft_p99: list[tuple[float, float] | None]  # ms; their least and most
    measured: list[Figures]
    measured_kinds: list[Kinds]  # of each rate
    predicted_parts: list[Parts]
    measured_parts: list[Parts]
    client_kept_up: list[bool]  # measured and predicted; else this rate tells of the client
    others: list[float]  # share of the cores that processes of nobody here had meanwhile
    # Steps of the idle cluster before and after it: measured over calibrated time, for which a run
    # is predicted. None: too few were measured.
    pace: list[float | None]
    drift: list[float]  # by which share the longer ones of these took longer
    predicted_goodput: float  # at the calibrated pace, as nobody knows another one beforehand
    paced_goodput: float | None  # at those of the rates; None: not between them
    measured_goodput: float | None  # likewise

    @property
    def case(self) -> str:
        """For people: the load and its promises."""
        return f"{self.load} ({self.ttft_s:.3g} s, {1e3 * self.tpot_s:.3g} ms)"

    @property
    def limits(self) -> list[str]:
        """What a rate tells of, if it is not the nodes; empty: it is."""
        return [*map(_limit, self.client_kept_up, self.others, self.drift)]

    @property
    def goodput_error(self) -> float | None:
        """Predicted over measured, minus 1; None: one of them is not between the rates."""
        if not self.measured_goodput or not self.paced_goodput:
            return None
        return self.paced_goodput / self.measured_goodput - 1

    @property
    def points(self) -> list[RatePoint]:
        """The measured attainment curve, as far as it tells of the nodes."""
        is_known = [not limit for limit in self.limits]
        return points_of(zip(self.rates, self.measured_kinds, is_known, strict=True))

    @property
    def simulated(self) -> list[RatePoint]:
        """Points of that curve, as each simulated run has them."""
        return [
            RatePoint(rate, kinds)
            for rate, runs in zip(self.rates, self.predicted_kinds, strict=True)
            for kinds in runs
        ]
