"""`pdserve plan`: how many nodes of which kind a load needs, and what they cost."""

from __future__ import annotations

import time

from pdserve.commands.bench.compare.goodput import Goodput
from pdserve.commands.bench.load.traces import mean_rate
from pdserve.commands.bench.output import print_json, print_tables
from pdserve.commands.simulation.plan.choice import choose
from pdserve.commands.simulation.plan.commands import commands, helm_values
from pdserve.commands.simulation.plan.config import PlanConfig
from pdserve.commands.simulation.plan.devices import answer as devices
from pdserve.commands.simulation.plan.devices import shown
from pdserve.commands.simulation.plan.knee import knee_of
from pdserve.commands.simulation.plan.report import Best, PlanReport
from pdserve.commands.simulation.plan.search import Search, front
from pdserve.commands.simulation.plan.table import tables
from pdserve.commands.simulation.predict.answer import (
    card_of,
    load_calibration,
    promise_of,
    question_of,
    rig_of,
)
from pdserve.commands.simulation.predict.deployment import Deployment, runs_of
from pdserve.commands.simulation.predict.goodput import find_goodput
from pdserve.commands.simulation.predict.load import rows_of
from pdserve.shared.errors import CalibrationError, ConfigError
from pdserve.shared.process.collector import freeze_loaded_objects
from pdserve.shared.process.exit_codes import FAILED, OK

_CLOSE = 1.1


def run(config: PlanConfig, setup: dict[str, object]) -> int:
    """Plan and print; the exit code is 1 if nothing serves the load.

    Raises:
        ConfigError: there is no rate, a mode cannot be planned with, or the load is outside of the
            calibration.
    """
    config.check()
    freeze_loaded_objects()  # most of the rest is what calls in progress hold
    if config.devices:
        return _with_devices(config, setup)
    report = answer(config)
    if config.json:
        print_json(report, setup)
    else:
        print_tables(tables(report))
    return OK if report.chosen else FAILED


def _with_devices(config: PlanConfig, setup: dict[str, object]) -> int:
    report = devices.answer(config)
    if config.json:
        print_json(report, setup)
    else:
        print_tables(shown.tables(report))
    return OK if report.chosen else FAILED


def answer(config: PlanConfig) -> PlanReport:
    """Make the plan. Raises as `run`."""
    began_s, prices = time.perf_counter(), config.prices
    calibration = load_calibration(config.calibration)
    question, rig = question_of(config), rig_of(config, calibration, admission=config.admission)
    rate, case = _rate(config), question.case(calibration, 0)
    promise = promise_of(config, rig, case, [Deployment(mode, 1, 1) for mode in config.modes])
    knee = knee_of(rig, case, promise, question.count)
    search = Search(rig, question, promise, prices, config.seeds, config.max_nodes)
    tried = search.tried(config.modes, rate, knee)
    of_modes = [[one for one in tried if one.deployment.mode == mode] for mode in config.modes]
    cheapest = [
        Best(one, _goodput(search, one.deployment, rate))
        for of_mode in of_modes
        for one in search.cheapest(of_mode)
    ]
    chosen, why = choose(cheapest)
    deployment = chosen.tried.deployment if chosen else None
    return PlanReport(
        card=card_of(config, rig),
        load=f"{case.name}: {case.shows}",
        rate=rate,
        promise=promise,
        target=config.target,
        knee=knee,
        chosen=chosen,
        why=why,
        cheapest=cheapest,
        front=front([one for one in tried if search.serves(one)]),
        tried=tried,
        unknown=search.unknown,
        changes=list(search.changes(deployment, rate)) if deployment else [],
        command=commands(deployment, calibration, promise, rig.policy) if deployment else [],
        helm=helm_values(deployment, calibration, promise, rig.policy) if deployment else {},
        seconds=time.perf_counter() - began_s,
    )


def _rate(config: PlanConfig) -> float:
    if config.rate:
        return config.rate
    if not config.trace:
        raise ConfigError("--rate: how many requests per second are to be served?")
    return mean_rate(rows_of(config.trace, 0)[: config.requests])


def _goodput(search: Search, deployment: Deployment, rate: float) -> Goodput | None:
    try:
        return find_goodput(
            lambda at: runs_of(
                search.rig, deployment, search.question, at, search.promise, search.num_seeds
            ),
            rate,
            search.rig.target,
            _CLOSE,
        ).goodput
    except CalibrationError as error:
        search.unknown[f"goodput of {deployment.text}"] = error.message
        return None
