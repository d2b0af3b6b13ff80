"""The report of a comparison computed anew from its raw requests, by the code that made it.

What was decided during the comparison (modes, targets, tunings, why it ended) is in `report.json`;
every figure comes from `requests.jsonl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from pdserve.commands.bench.compare.comparison import FoundCrossing, mode_reports
from pdserve.commands.bench.compare.config import Tuning
from pdserve.commands.bench.compare.interference import compare_itl
from pdserve.commands.bench.compare.report import CompareReport, ModeReport, ScenarioReport, Trial
from pdserve.commands.bench.compare.runner import WARM_UP_RUN, RunRecord, rate_row, unloaded_of
from pdserve.commands.bench.compare.sweep import WARM_UP, SweepResult
from pdserve.commands.bench.load.outcome import Outcome
from pdserve.commands.bench.load.slo_score import score
from pdserve.shared.errors import ConfigError

REPORT, REQUESTS = "report.json", "requests.jsonl"  # in the directory of a comparison


def read_results(folder: Path) -> tuple[CompareReport, list[RunRecord]]:
    """Read what a comparison has written; a line that was cut off by its end is left out.

    Raises:
        ConfigError: it has not written this.
    """
    try:
        report = msgspec.json.decode((folder / REPORT).read_bytes(), type=CompareReport)
        lines = (folder / REQUESTS).read_bytes().split(b"\n")[:-1]
        return report, [msgspec.json.decode(line, type=RunRecord) for line in lines]
    except OSError as error:
        raise ConfigError(f"--from {folder}: cannot read the results: {error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--from {folder}: these are no results of ours: {error}") from error


def recomputed(report: CompareReport, records: Sequence[RunRecord]) -> CompareReport:
    """Return the report with every figure computed from these runs.

    Raises:
        ConfigError: runs of a mode are missing.
    """
    modes: list[ModeReport] = []
    scenarios: list[ScenarioReport] = []
    for scenario in report.scenarios:
        runs = _Runs(scenario, records)
        former = [mode for mode in report.modes if mode.scenario == scenario.name]
        idle = {
            mode.mode: unloaded_of(*runs.outcomes(mode.mode, "idle", "burst")) for mode in former
        }
        result = SweepResult(next((mode.tuning for mode in former if mode.tuning), Tuning(0)))
        for mode in former:
            name = mode.mode
            rows = [
                (run, rate_row(run, idle[name], scenario.promise, scenario.target))
                for run in runs.of(name, "rate")
            ]
            result.rows[name] = [row for run, row in rows if not run.beside_itself]
            again = [row for run, row in rows if run.beside_itself]
            if again:
                result.again[name] = again
            if mode.interference is not None:
                result.interference[name] = compare_itl(*runs.outcomes(name, "quiet", "disturbed"))
            result.trials += [runs.trial(name, trial) for trial in mode.trials]
        warmed = {mode.mode: runs.of(mode.mode, WARM_UP_RUN)[-1:] for mode in former}
        result.said[WARM_UP] = {m: run.outcomes for m, last in warmed.items() for run in last}
        result.said |= runs.turns([mode.mode for mode in former])
        found = FoundCrossing(scenario.target, scenario.seed, result)
        modes += mode_reports(found, scenario.name, idle, result)
        scenarios.append(_scenario_report(scenario, found, result, runs))
    return CompareReport(modes, scenarios, report.failures, report.setup)


class _Runs:
    """The runs of one scenario."""

    def __init__(self, scenario: ScenarioReport, records: Sequence[RunRecord]) -> None:
        self._scenario = scenario
        self._records = [record for record in records if record.scenario == scenario.name]

    def of(self, mode: str, what: str) -> list[RunRecord]:
        """Return some runs of a mode, in the order in which they were made."""
        return [r for r in self._records if (r.mode, r.what) == (mode, what)]

    def outcomes(self, mode: str, *whats: str) -> list[list[Outcome]]:
        """Return the outcomes of the last run of each of these kinds. Raises ConfigError."""
        runs = [self.of(mode, what) for what in whats]
        if not all(runs):
            raise ConfigError(
                f"{REQUESTS} lacks runs of {mode} in {self._scenario.name} ({' or '.join(whats)}), "
                f"which {REPORT} tells of: they are not of one comparison"
            )
        return [same[-1].outcomes for same in runs]

    def trial(self, mode: str, former: Trial) -> Trial:
        """Return a trial of a tuning, scored again. Raises ConfigError."""
        runs = [run for run in self.of(mode, "tuning") if run.tuning == former.tuning]
        if not runs:
            raise ConfigError(f"{REQUESTS} lacks the trial of {mode}, {former.tuning.text}")
        promise, target = self._scenario.promise, self._scenario.target
        return Trial(former.tuning, former.rate, score(runs[-1].outcomes, promise, target))

    def turns(self, modes: Sequence[str]) -> dict[tuple[float, int], dict[str, Sequence[Outcome]]]:
        """Return what these modes answered to the same requests, as `SweepResult.said`."""
        turns: dict[tuple[float, int], dict[str, Sequence[Outcome]]] = {}
        for run in self._records:
            if run.what == "rate" and run.mode in modes and not run.beside_itself:
                turns.setdefault((run.rate or 0.0, run.turn), {})[run.mode] = run.outcomes
        return turns

    def at(self, rate: float) -> list[Outcome]:
        """Return the outcomes of the first run of the modes at this rate."""
        runs = (r for r in self._records if not r.beside_itself)
        return next(r.outcomes for r in runs if (r.what, r.rate) == ("rate", rate))


def _scenario_report(
    former: ScenarioReport, found: FoundCrossing, result: SweepResult, runs: _Runs
) -> ScenarioReport:
    rates = sorted({row.rate for rows in result.rows.values() for row in rows})
    sent = runs.at(rates[-1]) if rates else []
    return msgspec.structs.replace(
        former,
        mean_prompt_tokens=float(np.mean([o.num_prompt for o in sent])) if sent else 0.0,
        mean_output_tokens=float(np.mean([o.num_output for o in sent])) if sent else 0.0,
        rates=rates,
        verdicts=found.verdicts,
        noise=found.noise,
        answers=result.answers,
    )
