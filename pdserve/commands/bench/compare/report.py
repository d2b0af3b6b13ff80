"""The results of a comparison: all data of its table and its plots."""

from __future__ import annotations

import msgspec

from pdserve.commands.bench.compare.answers import Answers
from pdserve.commands.bench.compare.config import Tuning
from pdserve.commands.bench.compare.goodput import Goodput, RatePoint, Where
from pdserve.commands.bench.compare.interference import Interference
from pdserve.commands.bench.compare.scales import ScaledRun
from pdserve.commands.bench.compare.shown.verdict import Noise, Verdict
from pdserve.commands.bench.load.outcome import Percentiles, Promise
from pdserve.commands.bench.load.slo_score import Score


class Unloaded(msgspec.Struct, frozen=True):
    """Latencies of an idle cluster that was sent one request at a time."""

    requests: int
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    slowest_ttft_s: float
    median_tpot_s: float
    burst_requests: int  # sent all at once after that,
    burst_per_s: float  # and served at this rate: roughly its capacity


class RateRow(msgspec.Struct, frozen=True):
    """One mode at one rate."""

    rate: float  # intended arrivals per second
    duration_s: float
    score: Score
    client_kept_up: bool  # otherwise the times of this row are partly the client's own
    client_lag_p99_ms: float | None  # of a clock that ticks beside the client
    client_core_share: float  # CPU share of the client, in cores
    itl_p99_vs_unloaded: float | None
    prefilled_on: dict[str, int]  # node |-> requests
    beside_itself: bool = False  # it is the second one of its mode at this rate (A/A)

    @property
    def point(self) -> RatePoint:
        """The point of the attainment curve that goodput is computed from."""
        return RatePoint(self.rate, self.score.counts)

    @property
    def scaled(self) -> ScaledRun:
        """What the interval of a goodput is computed from."""
        return ScaledRun(self.rate, self.score.slo_scale)


class Trial(msgspec.Struct, frozen=True):
    """The result of one setup of the co-located mode, at one rate."""

    tuning: Tuning
    rate: float
    score: Score

    @property
    def merit(self) -> tuple[float, float]:
        """Lower is better: the scale of the tightest targets that could be met, then attainment."""
        scale = self.score.slo_scale
        return (float("inf") if scale is None else scale, -self.score.attainment)


class ModeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One mode in one scenario."""

    scenario: str
    mode: str
    goodput: float  # requests per second of the whole cluster
    goodput_is: Where
    goodput_interval: tuple[float, float | None]  # 5 to 95 %; 0, null: beyond the rates
    tuning: Tuning | None  # the best setup of the co-located mode
    unloaded: Unloaded
    interference: Interference | None
    trials: list[Trial]
    rows: list[RateRow]  # by rate

    @classmethod
    def of(
        cls,
        scenario: str,
        mode: str,
        goodput: Goodput,
        *,
        tuning: Tuning | None,
        unloaded: Unloaded,
        interference: Interference | None,
        trials: list[Trial],
        rows: list[RateRow],
    ) -> ModeReport:
        """Make a report from these results, with the fields of `goodput` spread out."""
        return cls(
            scenario=scenario,
            mode=mode,
            goodput=goodput.rate,
            goodput_is=goodput.where,
            goodput_interval=(goodput.low, goodput.high),
            tuning=tuning,
            unloaded=unloaded,
            interference=interference,
            trials=trials,
            rows=rows,
        )

    @property
    def goodput_text(self) -> str:
        """Goodput for people: "3.2/s", or on which side of the measured rates it must be."""
        match self.goodput_is:
            case "above the rates":
                return f"{self.goodput:.3g}/s or more"
            case "below the rates":
                return f"< {self.rows[0].rate:.3g}/s"
            case "crossing":
                return f"{self.goodput:.3g}/s"

    @property
    def interval_text(self) -> str:
        """The interval for people: "2.9-3.4", or on one side of the measured rates."""
        low, high = self.goodput_interval
        if high is None:
            return f"> {low:.3g}" if low else "unknown"
        return f"{low:.3g}-{high:.3g}" if low else f"< {high:.3g}"


class ScenarioReport(msgspec.Struct, frozen=True):
    """The settings of a scenario that were the same for every mode."""

    name: str
    shows: str
    promise: Promise
    promise_is: str  # how the targets were derived
    target: float
    seed: int  # of the requests, and of what is drawn for intervals
    mean_prompt_tokens: float  # of the requests at the highest rate
    mean_output_tokens: float
    num_cut: int  # requests of a trace that were cut to fit the model
    length_factor: float  # factor on the lengths of the trace or scenario
    rates: list[float]
    verdicts: list[Verdict]
    noise: Noise | None  # None: no server was measured twice
    cores: int  # that all servers had, and their clients
    stopped: str  # why no further rate was measured
    seconds: float  # time that the scenario took
    answers: Answers = msgspec.field(default_factory=Answers)


class CompareReport(msgspec.Struct, frozen=True):
    """The complete report; `setup` is what is needed to repeat the comparison."""

    modes: list[ModeReport]  # one for each mode and scenario
    scenarios: list[ScenarioReport]
    failures: dict[str, str]  # mode |-> why it is missing, in some scenario
    setup: dict[str, object]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is missing, and whoever had to answer alike did."""
        differ = any(scenario.answers.num_different for scenario in self.scenarios)
        return not self.failures and not differ
