"""What modes are compared on: workloads, and how their targets follow from an idle cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.load.scenarios import SCENARIOS, Scenario, ScenarioName
from pdserve.bench.load.traces import TraceRow
from pdserve.bench.load.workload import SyntheticWorkload, TraceWorkload, Workload, trace_factor

_TRACE_TTFT_SCALE = 5.0
_TRACE_TPOT_SCALE = 2.5
_TRACE_DECK = 10


@dataclass(frozen=True, slots=True)
class CompareCase:
    """A workload that fits the model."""

    name: str
    shows: str
    workload: Workload
    ttft_scale: float
    tpot_scale: float
    deck: int  # number of requests that form a fair sample
    length_factor: float  # factor on the lengths of the trace or scenario
    num_cut: int = 0  # requests that were cut to fit the model
    scenario: Scenario | None = None  # None: a trace

    @property
    def share(self) -> float:
        """Share of the time that is available for several cases."""
        return self.scenario.share if self.scenario is not None else 1.0

    def whole_decks(self, count: int) -> int:
        """Return `count` or a few more: a number of requests with the exact mixture."""
        return -(-count // self.deck) * self.deck


def made_up(name: ScenarioName, max_model_len: int, length_scale: float, seed: int) -> CompareCase:
    """Make a case from a named scenario; `length_scale` 0 leaves it as it is.

    Raises:
        ConfigError: its longest request does not fit the model.
    """
    scenario = SCENARIOS[name]
    fitted = scenario.fitted(max_model_len, length_scale or 1.0)
    return CompareCase(
        name=name,
        shows=scenario.shows,
        workload=SyntheticWorkload(fitted, seed),
        ttft_scale=scenario.ttft_scale,
        tpot_scale=scenario.tpot_scale,
        deck=scenario.deck,
        length_factor=fitted.most_tokens / scenario.most_tokens,
        scenario=fitted,
    )


def replayed(
    name: str, rows: Sequence[TraceRow], max_model_len: int, length_scale: float, seed: int
) -> CompareCase:
    """Make a case from a trace; `length_scale` 0 makes 99 of 100 requests fit the model."""
    factor = length_scale or trace_factor(rows, max_model_len)
    workload = TraceWorkload(rows, factor, max_model_len, seed)
    return CompareCase(
        name=name,
        shows=f"{len(rows)} requests of a trace, lengths times {workload.factor:.3g}",
        workload=workload,
        ttft_scale=_TRACE_TTFT_SCALE,
        tpot_scale=_TRACE_TPOT_SCALE,
        deck=_TRACE_DECK,
        length_factor=workload.factor,
        num_cut=workload.num_cut,
    )
