"""`pdserve simulate`: deployments under a load, without the cluster."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.traces import mean_rate
from pdserve.commands.bench.output import print_json, print_tables
from pdserve.commands.simulation.predict.answer import (
    card_of,
    load_calibration,
    promise_of,
    question_of,
    rig_of,
)
from pdserve.commands.simulation.predict.deployment import Deployment, Rig, runs_of
from pdserve.commands.simulation.predict.goodput import Runs, find_goodput
from pdserve.commands.simulation.predict.load import Question, capacity, rows_of
from pdserve.commands.simulation.simulate.config import SimulateConfig
from pdserve.commands.simulation.simulate.report import ModeAnswer, SimulateReport
from pdserve.commands.simulation.simulate.table import tables
from pdserve.shared.process.collector import freeze_loaded_objects
from pdserve.shared.process.exit_codes import OK

_CLOSE = 1.05


def run(config: SimulateConfig, setup: dict[str, object]) -> int:
    """Simulate and print; the exit code.

    Raises:
        ConfigError: settings contradict each other, or the load is outside of the calibration.
    """
    config.check()
    freeze_loaded_objects()  # most of the rest is what calls in progress hold
    report = answer(config)
    if config.json:
        print_json(report, setup)
    else:
        print_tables(tables(report))
    return OK


def answer(config: SimulateConfig) -> SimulateReport:
    """Simulate all that is asked for. Raises as `run`."""
    calibration = load_calibration(config.calibration)
    question, rig = question_of(config), rig_of(config, calibration, admission=config.admission)
    chosen = [(mode, "") for mode in config.modes]
    chosen += [(config.modes[0], policies) for policies in config.policies]
    deployments = [
        variant
        for mode, policies in chosen
        for variant in rig.variants(Deployment(mode, config.prefill, config.decode, policies))
    ]
    case = question.case(calibration, 0)
    promise = promise_of(config, rig, case, deployments)
    rates = config.rates
    if config.scale:
        rates = [config.scale * mean_rate(rows_of(config.trace, 0)[: config.requests])]
    modes = [_answer_for(config, rig, d, question, promise, rates) for d in deployments]
    return SimulateReport(
        card=card_of(config, rig),
        load=f"{case.name}: {case.shows}",
        promise=promise,
        target=config.target,
        modes=modes,
    )


def _answer_for(
    config: SimulateConfig,
    rig: Rig,
    deployment: Deployment,
    question: Question,
    promise: Promise,
    rates: Sequence[float],
) -> ModeAnswer:
    def runs_at(rate: float) -> Runs:
        return runs_of(rig, deployment, question, rate, promise, config.seeds)

    if rates:
        return ModeAnswer(
            deployment, None, [row for rate in rates for row in runs_at(rate)], [], ""
        )
    start = capacity(rig.calibration, question, deployment.num_nodes) / 2
    found = find_goodput(runs_at, start, config.target, _CLOSE)
    rows = [row for runs in found.runs for row in runs]
    return ModeAnswer(deployment, found.goodput, rows, found.outside, found.why)
