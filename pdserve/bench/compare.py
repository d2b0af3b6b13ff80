"""Goodput of several ways to serve one model on the same cores, on the same requests.

1. Each mode, started without promises, is sent requests one at a time, and then all at once: what
   it does when idle, and about what it takes at most.
2. A scenario's promises are multiples of the best idle figures of all modes, so the same for all.
3. The co-located mode is tuned: as many nodes as the others have, or one of all cores, each with
   several sizes of local chunks, are tried at a rate somewhat below what the modes take, and what
   would have met the tightest promises stays.
4. All modes are started with the promises. Rates are measured as `ladder` says, every mode at every
   rate, in an order that rotates: what else happens on the machine hits all of them alike.

Modes that wait for their turn are idle; their heartbeats are all they cost the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pdserve.bench.compare_plan import COLOCATED, ComparePlan
from pdserve.bench.compare_report import ModeReport, ScenarioReport, Unloaded
from pdserve.bench.contest import Contender
from pdserve.bench.goodput import goodput
from pdserve.bench.match import Match, Result
from pdserve.bench.slo_score import Promise
from pdserve.bench.stage import Stage
from pdserve.bench.subject import Subject
from pdserve.config import Mode
from pdserve.errors import ClusterError, ConfigError

_BURST = 20  # requests at once, at least: enough to fill batches

MakeSubjects = Callable[[int], Sequence[Subject]]  # for a model that takes so many tokens


async def compare(
    stage: Stage, make_subjects: MakeSubjects
) -> tuple[list[ModeReport], list[ScenarioReport]]:
    """Measure everything; `stage.failures` says which mode is missing, and why.

    Raises:
        ClusterError: no mode could be measured at all.
        ConfigError: as `promise_of`.
    """
    end_s = stage.clock.now() + stage.plan.budget_s
    subjects, idle = await _measure_idle(stage, make_subjects)
    modes: list[ModeReport] = []
    scenarios: list[ScenarioReport] = []
    for number, subject in enumerate(subjects):
        started_s = stage.clock.now()
        until_s = started_s + (end_s - started_s) / (len(subjects) - number)
        promise, promise_is = promise_of(stage.plan, subject, idle[subject.name].values())
        result = await Match(stage, subject, promise, idle[subject.name]).play(until_s)
        modes += _mode_reports(stage.plan, subject, idle[subject.name], result)
        took_s = stage.clock.now() - started_s
        scenarios.append(_scenario_report(stage, subject, promise, promise_is, result, took_s))
    return modes, scenarios


def promise_of(
    plan: ComparePlan, subject: Subject, idle: Iterable[Unloaded]
) -> tuple[Promise, str]:
    """What is promised in every mode, and where that comes from.

    Raises:
        ConfigError: no TPOT was given, and answers are too short to have one.
    """
    best = list(idle)
    parts = []
    ttft_s, tpot_s = plan.ttft_s, plan.tpot_s
    if not ttft_s:
        scale = plan.ttft_scale or subject.ttft_scale
        ttft_s = scale * min(unloaded.slowest_ttft_s for unloaded in best)
        parts.append(f"TTFT {scale:g} times the slowest of an idle cluster")
    if not tpot_s:
        scale = plan.tpot_scale or subject.tpot_scale
        tpot_s = scale * min(unloaded.median_tpot_s for unloaded in best)
        if not tpot_s:
            raise ConfigError(
                f"{subject.name}: most answers are one token long, so no TPOT follows from them; "
                "give --tpot-s, or a larger --length-scale"
            )
        parts.append(f"TPOT {scale:g} times the median of an idle cluster")
    return Promise(ttft_s, tpot_s), "; ".join(parts) or "as given"


async def _measure_idle(
    stage: Stage, make_subjects: MakeSubjects
) -> tuple[Sequence[Subject], dict[str, dict[Mode, Unloaded]]]:
    """The subjects; name of a subject |-> mode |-> what it does when idle."""
    subjects: Sequence[Subject] = []
    found: dict[str, dict[Mode, Unloaded]] = {}
    for mode in stage.plan.modes:
        contender = Contender(mode)
        measured: dict[str, Unloaded] = {}
        try:
            async with stage.launch(contender, None) as server:
                subjects = subjects or make_subjects(server.max_model_len)
                for subject in subjects:
                    stage.tell(f"{subject.name}: {mode}, idle")
                    bout = await stage.begin(server, contender, subject)
                    alone, together = (
                        subject.workload.first(subject.whole_decks(count))
                        for count in (stage.plan.idle_requests, _BURST)
                    )
                    measured[subject.name] = await bout.unloaded(alone, together)
        except ClusterError as error:
            stage.fail(mode, error)
        else:
            for name, unloaded in measured.items():
                found.setdefault(name, {})[mode] = unloaded
    if not found:
        reasons = "; ".join(f"{mode}: {why}" for mode, why in stage.failures.items())
        raise ClusterError(f"no mode could be measured: {reasons}")
    return subjects, found


def _mode_reports(
    plan: ComparePlan, subject: Subject, idle: dict[Mode, Unloaded], result: Result
) -> list[ModeReport]:
    return [
        ModeReport.of(
            subject.name,
            mode,
            goodput([row.point for row in rows], plan.target, plan.seed),
            tuning=result.tuning if mode == COLOCATED else None,
            unloaded=idle[mode],
            interference=result.interference.get(mode),
            trials=result.trials if mode == COLOCATED else [],
            rows=sorted(rows, key=lambda row: row.rate),
        )
        for mode, rows in result.rows.items()
        if rows
    ]


def _scenario_report(
    stage: Stage,
    subject: Subject,
    promise: Promise,
    promise_is: str,
    result: Result,
    took_s: float,
) -> ScenarioReport:
    rates = sorted({row.rate for rows in result.rows.values() for row in rows})
    sent = stage.requests_at(subject, rates[-1])[0] if rates else []
    return ScenarioReport(
        name=subject.name,
        shows=subject.shows,
        promise=promise,
        promise_is=promise_is,
        target=stage.plan.target,
        mean_prompt_tokens=float(np.mean([len(r.prompt) for r in sent])) if sent else 0.0,
        mean_output_tokens=float(np.mean([r.num_output for r in sent])) if sent else 0.0,
        num_cut=subject.num_cut,
        length_factor=subject.length_factor,
        rates=rates,
        stopped=result.stopped,
        seconds=took_s,
    )
