"""One deployment under one load: what was predicted of it, and what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from pdserve.bench.compare.goodput import Draws, Goodput, RatePoint, drawn, goodput
from pdserve.bench.load.slo_score import Score
from pdserve.simulation.predict.parts import Parts

_SHARES = ("attainment", "attainment_low", "attainment_high")


class Figures(msgspec.Struct, frozen=True):
    """What is compared of one run; latencies in milliseconds."""

    attainment: float
    attainment_low: float  # 95 % interval
    attainment_high: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float

    @classmethod
    def of(cls, score: Score) -> Figures:
        """Return a run's figures."""
        ttft, tpot = score.ttft_ms, score.tpot_ms
        return cls(
            score.attainment,
            score.attainment_low,
            score.attainment_high,
            ttft.p50 or 0.0,
            ttft.p99 or 0.0,
            tpot.p50 or 0.0,
            tpot.p99 or 0.0,
        )

    @classmethod
    def between(cls, scores: Sequence[Score]) -> Figures:
        """Return what several runs with the same requests tell of another one.

        Attainments are means. Latencies are medians: those of a run depend on whether one request
        more was too late to be served first, so runs lie on two sides of their mean.
        """
        figures = [msgspec.structs.asdict(cls.of(score)) for score in scores]
        means = {name: statistics.fmean(run[name] for run in figures) for name in figures[0]}
        medians = {name: statistics.median(run[name] for run in figures) for name in figures[0]}
        return cls(**{name: (means if name in _SHARES else medians)[name] for name in means})


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment under one load, at several rates."""

    load: str
    ttft_s: float  # what was promised
    tpot_s: float
    deployment: str
    rates: list[float]  # per second, ascending
    predicted: list[Figures]
    predicted_ttft_p99: list[tuple[float, float]]  # ms; least and most of the simulated runs
    measured: list[Figures]
    measured_kinds: list[dict[str, tuple[int, int]]]  # of each rate: kind |-> (in time, sent)
    predicted_parts: list[Parts]
    measured_parts: list[Parts]
    alone: list[float | None]  # steps beside which nothing ran: measured over calibrated time
    predicted_goodput: float
    measured_goodput: float | None  # None: not between the rates

    @property
    def case(self) -> str:
        """For people: the load and its promises."""
        return f"{self.load} ({self.ttft_s:.3g} s, {1e3 * self.tpot_s:.3g} ms)"

    @property
    def goodput_error(self) -> float | None:
        """Predicted over measured, minus 1."""
        if not self.measured_goodput:
            return None
        return self.predicted_goodput / self.measured_goodput - 1

    def goodput(self, target: float) -> Goodput:
        """Return the measured goodput, with its interval."""
        return goodput(self._points, target, seed=0)

    def drawn(self, target: float) -> Draws:
        """Return what the measured goodput may be, for all that chance allows."""
        return drawn(self._points, target, seed=0)

    @property
    def _points(self) -> list[RatePoint]:
        return [
            RatePoint(rate, kinds)
            for rate, kinds in zip(self.rates, self.measured_kinds, strict=True)
        ]
