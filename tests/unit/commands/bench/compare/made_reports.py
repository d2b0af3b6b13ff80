"""A small comparison that nobody has measured."""

from __future__ import annotations

from pdserve.commands.bench.compare.config import Tuning
from pdserve.commands.bench.compare.goodput import goodput
from pdserve.commands.bench.compare.interference import Interference
from pdserve.commands.bench.compare.report import (
    CompareReport,
    ModeReport,
    RateRow,
    ScenarioReport,
    Trial,
    Unloaded,
)
from pdserve.commands.bench.compare.runner import RunRecord, rate_row
from pdserve.commands.bench.compare.shown.verdict import Verdict
from pdserve.commands.bench.load.outcome import Outcome, Percentiles, Promise

PROMISE = Promise(ttft_s=1.0, tpot_s=0.02)
TARGET = 0.9


def outcome(
    gap_s: float, *, is_refused: bool = False, late_s: float = 0.0, kind: str = "chat"
) -> Outcome:
    arrivals = [] if is_refused else [0.5, 0.5 + gap_s, 0.5 + 2 * gap_s]
    return Outcome(
        kind=kind,
        due_s=0.0,
        sent_s=late_s,
        num_prompt=10,
        num_output=3,
        arrivals_s=arrivals,
        num_received=len(arrivals),
        end="refused" if is_refused else "finished",
        error="429 overloaded" if is_refused else "",
    )


def unloaded() -> Unloaded:
    times = Percentiles(100, 10.0, 20.0, 30.0)
    return Unloaded(5, times, times, times, 0.3, 0.01, 5, 4.0)


def row(rate: float, num_met: int, num_refused: int = 0, late_s: float = 0.0) -> RateRow:
    """Of ten requests."""
    outcomes = [outcome(0.01, late_s=late_s)] * num_met
    outcomes += [outcome(0.01, is_refused=True)] * num_refused
    outcomes += [outcome(0.05)] * (10 - len(outcomes))
    record = RunRecord("rate", "made-up", "", None, rate, outcomes, False, 1.0, 0.1)
    return rate_row(record, unloaded(), PROMISE, TARGET)


def made_report() -> CompareReport:
    """Two modes, of which one is disturbed and the other one tuned; a third one is missing."""
    times = Percentiles(100, 10.0, 11.0, 12.0)
    rows = {
        "disaggregated": [row(1.0, 10), row(2.0, 8)],
        "colocated": [row(1.0, 10, late_s=0.2), row(2.0, 4, num_refused=5)],
    }
    modes = [
        ModeReport.of(
            "made-up",
            mode,
            goodput([one.point for one in mode_rows], TARGET, 0),
            tuning=Tuning(64) if mode == "colocated" else None,
            unloaded=unloaded(),
            interference=Interference(4, times, times, 1.25, 4, 4, 8)
            if mode == "disaggregated"
            else None,
            trials=[
                Trial(Tuning(0), 1.5, row(1.5, 5).score),
                Trial(Tuning(64), 1.5, row(1.5, 9).score),
            ]
            if mode == "colocated"
            else [],
            rows=mode_rows,
        )
        for mode, mode_rows in rows.items()
    ]
    scenario = ScenarioReport(
        name="made-up",
        shows="nothing",
        promise=PROMISE,
        promise_is="as given",
        target=TARGET,
        seed=0,
        mean_prompt_tokens=100.0,
        mean_output_tokens=50.0,
        num_cut=3,
        length_factor=1.0,
        rates=[1.0, 2.0],
        verdicts=[Verdict("disaggregated", "colocated", None, False, "nobody has measured this")],
        noise=None,
        cores=2,
        stopped="2 rates were measured",
        seconds=40.0,
    )
    return CompareReport(modes, [scenario], {"adaptive": "it has no nodes"}, {"config": {}})
