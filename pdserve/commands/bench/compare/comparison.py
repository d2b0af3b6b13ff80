"""Goodput of several serving modes for one model, on the same cores with the same requests.

1. Each mode is started without latency targets, and is sent requests one at a time, then all at
   once. This gives its latencies when idle, and roughly its capacity.
2. A scenario's targets are multiples of the best idle latencies of all modes, so they are the same
   for all modes.
3. The co-located mode is tuned at a rate somewhat below the modes' capacity: with as many nodes as
   the other modes, or one node with all cores, each with several sizes of local chunks. The setup
   that would have met the tightest targets is kept.
4. All modes are started with the targets. `next_rate` chooses the rate of each for the next round;
   at one rate they have the same requests. The first mode is measured once more with others. Rounds
   go forwards and backwards in turns, so that other load on the machine affects all modes alike.
5. What the runs leave possible of each goodput decides what can be said of two (`verdict.py`).

Modes that wait for their turn are idle; only their heartbeats cost the others anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from pdserve.commands.bench.compare.cases import TOGETHER, CompareCase
from pdserve.commands.bench.compare.config import COLOCATED, ComparePlan
from pdserve.commands.bench.compare.goodput import bounded
from pdserve.commands.bench.compare.lengths import fitted
from pdserve.commands.bench.compare.report import (
    CompareReport,
    ModeReport,
    ScenarioReport,
    Unloaded,
)
from pdserve.commands.bench.compare.runner import Candidate, Experiment, ModeServer
from pdserve.commands.bench.compare.shown.verdict import verdicts
from pdserve.commands.bench.compare.sweep import Sweep, SweepResult
from pdserve.commands.bench.load.outcome import Promise
from pdserve.shared.errors import ClusterError, ConfigError

_BURST = 20  # least number of requests sent at once: enough to fill batches

MakeCases = Callable[[int], Sequence[CompareCase]]  # argument: the model's maximum length in tokens


async def compare(experiment: Experiment, make_cases: MakeCases, report: CompareReport) -> None:
    """Measure everything, into `report`; when cancelled, it has what was measured until then.

    `experiment.failures` records which modes are missing, and why.

    Raises:
        ClusterError: no mode could be measured at all.
        ConfigError: as `promise_of`.
    """
    end_s = experiment.clock.now() + experiment.plan.budget_s
    cases, idle = await _measure_idle(experiment, make_cases)
    for number, case in enumerate(cases):
        started_s = experiment.clock.now()
        is_quick = experiment.plan.is_quick
        shares = [1.0 if is_quick else later.share for later in cases[number:]]
        until_s = started_s + (end_s - started_s) * shares[0] / sum(shares)
        promise, promise_is = promise_of(experiment.plan, case, idle[case.name].values())
        result = SweepResult(experiment.plan.tunings[0])
        try:
            await Sweep(experiment, case, promise, idle[case.name]).run(result, until_s)
        finally:
            found = FoundCrossing(experiment.plan.target, experiment.plan.seed, result)
            report.modes.extend(mode_reports(found, case.name, idle[case.name], result))
            took_s = experiment.clock.now() - started_s
            report.scenarios.append(
                _scenario_report(experiment, case, promise, promise_is, found, result, took_s)
            )


def promise_of(
    plan: ComparePlan, case: CompareCase, idle: Iterable[Unloaded]
) -> tuple[Promise, str]:
    """Return the targets for every mode, and how they were derived.

    Raises:
        ConfigError: no TPOT was given, and answers are too short to have one.
    """
    best = list(idle)
    parts = []
    ttft_s, tpot_s = plan.ttft_s, plan.tpot_s
    if not ttft_s:
        scale = plan.ttft_scale or case.ttft_scale
        ttft_s = scale * min(unloaded.slowest_ttft_s for unloaded in best)
        parts.append(f"TTFT {scale:g} times the slowest of an idle cluster")
    if not tpot_s:
        scale = plan.tpot_scale or case.tpot_scale
        tpot_s = scale * min(unloaded.median_tpot_s for unloaded in best)
        if not tpot_s:
            raise ConfigError(
                f"{case.name}: TPOT cannot be measured, as most answers are one token long; "
                "give --tpot-s, or a larger length_scale"
            )
        parts.append(f"TPOT {scale:g} times the median of an idle cluster")
    return Promise(ttft_s, tpot_s), "; ".join(parts) or "as given"


async def _measure_idle(
    experiment: Experiment, make_cases: MakeCases
) -> tuple[Sequence[CompareCase], dict[str, dict[str, Unloaded]]]:
    """Return the cases, and case name |-> mode |-> latencies when idle.

    With the first mode, requests are found for which there is time.
    """
    plan, cases = experiment.plan, list[CompareCase]()
    found: dict[str, dict[str, Unloaded]] = {}
    for mode in plan.modes:
        measured: dict[str, Unloaded] = {}
        try:
            async with experiment.launch(Candidate(mode), None) as server:
                cases = cases or [*make_cases(server.max_model_len)]
                measure = partial(_idle, experiment, server, Candidate(mode))
                for number, case in enumerate(cases):
                    if plan.shortens and not found:
                        cases[number], measured[case.name] = await fitted(
                            plan, case, len(cases), measure
                        )
                    else:
                        measured[case.name] = await measure(case)
        except ClusterError as error:
            experiment.fail(mode, error)
        else:
            for name, unloaded in measured.items():
                found.setdefault(name, {})[mode] = unloaded
    if not found:
        reasons = "; ".join(f"{mode}: {why}" for mode, why in experiment.failures.items())
        raise ClusterError(f"no mode could be measured: {reasons}")
    return cases, found


async def _idle(
    experiment: Experiment, server: ModeServer, candidate: Candidate, case: CompareCase
) -> Unloaded:
    """Measure an idle cluster. Raises ClusterError as `CandidateRunner.unloaded`."""
    experiment.tell(f"{case.name}: {candidate.mode}, idle; lengths times {case.length_factor:.3g}")
    runner = await experiment.begin(server, candidate, case)
    together = case.workload.first(case.whole_decks(_BURST), TOGETHER)
    return await runner.unloaded(case.sample(experiment.plan.idle_requests), together)


class FoundCrossing:
    """What the runs at the rates have shown."""

    def __init__(self, target: float, seed: int, result: SweepResult) -> None:
        """`seed`: of the numbers that are drawn for intervals."""
        draws = result.draws(seed)
        self.goodputs = {
            mode: bounded([row.point for row in result.runs(mode)], target, draws[mode])
            for mode in draws
        }
        self.noise = result.noise(seed)
        rates = {mode: [run.rate for run in result.rows[mode]] for mode in draws}
        self.verdicts = verdicts(draws, self.noise, rates) if draws else []


def mode_reports(
    found: FoundCrossing, scenario: str, idle: Mapping[str, Unloaded], result: SweepResult
) -> list[ModeReport]:
    """Return the reports of the modes of a scenario."""
    return [
        ModeReport.of(
            scenario,
            mode,
            found.goodputs[mode],
            tuning=result.tuning if mode == COLOCATED else None,
            unloaded=idle[mode],
            interference=result.interference.get(mode),
            trials=result.trials if mode == COLOCATED else [],
            rows=sorted(rows + result.again.get(mode, []), key=lambda row: row.rate),
        )
        for mode, rows in result.rows.items()
        if rows
    ]


def _scenario_report(
    experiment: Experiment,
    case: CompareCase,
    promise: Promise,
    promise_is: str,
    found: FoundCrossing,
    result: SweepResult,
    took_s: float,
) -> ScenarioReport:
    rates = sorted({row.rate for rows in result.rows.values() for row in rows})
    sent = experiment.requests_at(case, rates[-1], result.turns[rates[-1]]) if rates else []
    return ScenarioReport(
        name=case.name,
        shows=case.shows,
        promise=promise,
        promise_is=promise_is,
        target=experiment.plan.target,
        seed=experiment.plan.seed,
        mean_prompt_tokens=float(np.mean([len(r.prompt) for r in sent])) if sent else 0.0,
        mean_output_tokens=float(np.mean([r.num_output for r in sent])) if sent else 0.0,
        num_cut=case.num_cut,
        length_factor=case.length_factor,
        rates=rates,
        verdicts=found.verdicts,
        noise=found.noise,
        cores=len(os.sched_getaffinity(0)),
        stopped=result.stopped,
        seconds=took_s,
        answers=result.answers,
    )
