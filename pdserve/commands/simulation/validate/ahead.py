"""What is predicted before anything is measured: goodputs, and runs at rates around them.

A run lasts as long as its requests arrive. Whoever would go on with a conversation later does not,
neither here nor in the measured run: of a few of its sessions, an agent would go on for minutes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from pdserve.commands.bench.compare.cases import CompareCase
from pdserve.commands.bench.compare.runner import drain_s
from pdserve.commands.bench.load.open_loop import longest_s
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.simulation.predict import deployment as simulated
from pdserve.commands.simulation.predict.answer import promise_of
from pdserve.commands.simulation.predict.config import PredictConfig
from pdserve.commands.simulation.predict.deployment import Deployment, Result, Rig
from pdserve.commands.simulation.predict.goodput import find_goodput
from pdserve.commands.simulation.predict.load import Question, Ranged, capacity, turn_at
from pdserve.commands.simulation.validate.config import PredictionConfig
from pdserve.measured.calibration import Calibration
from pdserve.settings.config import PolicyConfig
from pdserve.shared.errors import ConfigError

MOST_MORE: Final = 1  # rates beyond those that were asked for

PACE_S: Final = 2.0  # for which the idle cluster is looked at before and after each rate

_CLOSE = 1.05
_SEEDS: Final = range(3)  # simulations of a rate: their scatter differs, their requests do not
_MORE_SEEDS: Final = range(5)  # of a rate that is measured
_TIMES_TTFT = 3
_SESSIONS_S = 20.0  # over which sessions arrive, if that is less than for as many to end as begin
# Roughly, of one deployment; and of a run.
_START_S, _SIMULATED_S, _ANSWER_S = 10.0, 60.0, 5.0 + PACE_S


@dataclass(frozen=True)
class Asked:
    """A deployment under a load."""

    config: PredictionConfig
    calibration: Calibration
    question: Question
    deployment: Deployment
    promise: Promise

    @cached_property
    def case(self) -> CompareCase:
        """Its requests."""
        return case_of(self.config, self.calibration, self.question)

    @property
    def title(self) -> str:
        """For people."""
        ttft_s, tpot_ms = self.promise.ttft_s, 1e3 * self.promise.tpot_s
        deployment = self.deployment.text
        return f"{self.case.name}, TTFT {ttft_s:.3g} s, TPOT {tpot_ms:.3g} ms, {deployment}"


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is predicted of one."""

    asked: Asked
    goodput: float
    predicted: Mapping[float, Sequence[Result]]  # rate |-> its runs
    outside: Mapping[str, tuple[int, int]]  # as `Ranged.outside`

    @property
    def seconds(self) -> list[float]:
        """How long each rate will be measured."""
        return [PACE_S + max(run.seconds for run in runs) for runs in self.predicted.values()]


def case_of(config: PredictionConfig, calibration: Calibration, question: Question) -> CompareCase:
    """Return the requests of a load. Raises ConfigError."""
    case = question.case(calibration, config.seed)
    return replace(case, least_s=min(case.least_s, _SESSIONS_S))


def rig_for(config: PredictionConfig, calibration: Calibration) -> Rig:
    """Return what all simulations have in common."""
    return Rig(
        calibration=calibration,
        policy=PolicyConfig(),
        ranges=Ranged(calibration, extrapolates=True),
        one_host=True,
        admission=False,
        target=config.target,
        lengths_told=True,
    )


def promises_of(
    config: PredictionConfig, rig: Rig, question: Question, deployments: Sequence[Deployment]
) -> list[Promise]:
    """Return the promises of a load. Raises ConfigError."""
    case = case_of(config, rig.calibration, question)
    asked = PredictConfig(ttft_s=config.ttft_s, tpot_s=config.tpot_s, target=config.target)
    whole = promise_of(asked, rig, case, deployments)
    factors = config.promise_factors
    return [Promise(factor * whole.ttft_s, factor * whole.tpot_s) for factor in factors]


def count_of(config: PredictionConfig, case: CompareCase, rate: float, promise: Promise) -> int:
    """Return the requests of a run, which come for much longer than one of them may take."""
    return case.count_at(rate, config.requests, max(config.run_s, _TIMES_TTFT * promise.ttft_s))


def ahead(numbered: tuple[int, Asked]) -> tuple[int, Ahead | str]:
    """Predict one; its number comes back. A text: why there is nothing to measure."""
    number, asked = numbered
    config, rig = asked.config, rig_for(asked.config, asked.calibration)
    try:
        goodput = _goodput(asked, rig)
    except ConfigError as error:
        return number, error.message
    rates = [share * goodput for share in config.loads]
    predicted = {rate: simulated_runs(asked, rig, rate) for rate in rates}
    # A copy, without the case: what makes its requests does not go from process to process.
    return number, Ahead(replace(asked), goodput, predicted, rig.ranges.outside)


@dataclass(frozen=True, slots=True)
class Paced:
    """A rate, and the pace that the idle cluster had around it: as `Row.pace`."""

    asked: Asked
    rate: float
    pace: float


def at_pace(paced: Paced) -> tuple[float, Sequence[Result]]:
    """Predict a rate at a pace; the rate comes back."""
    asked = paced.asked
    rig = replace(rig_for(asked.config, asked.calibration), slower=paced.pace)
    return paced.rate, simulated_runs(asked, rig, paced.rate)


def _goodput(asked: Asked, rig: Rig) -> float:
    """Predict the goodput of one deployment under one load.

    Raises:
        ConfigError: there is none, so no rate is worth measuring.
    """
    config, case, promise, deployment = asked.config, asked.case, asked.promise, asked.deployment

    def simulate(rate: float) -> list[Result]:
        count = count_of(config, case, rate, promise)
        return [
            simulated.run(rig, deployment, case, rate, count, promise, n, stop_s=count / rate)
            for n in _SEEDS
        ]

    start = capacity(rig.calibration, asked.question, deployment.num_nodes) / 2
    goodput = find_goodput(simulate, start, config.target, _CLOSE).goodput
    if goodput.where != "crossing":
        raise ConfigError(
            f"{case.name}, {deployment.text}: no rate is predicted at which TTFT "
            f"{promise.ttft_s:.3g} s and TPOT {promise.tpot_s:.3g} s are just kept: its goodput is "
            f"{goodput.where}; give another --ttft-s or --tpot-s"
        )
    return goodput.rate


def simulated_runs(asked: Asked, rig: Rig, rate: float) -> list[Result]:
    """Simulate a run to its end, which comes when its client gives up."""
    case, promise, deployment = asked.case, asked.promise, asked.deployment
    count = count_of(asked.config, case, rate, promise)
    requests = case.workload.timed(rate, count, turn_at(rate))
    begin_s, each_s = max(r.at_s for r in requests if r.after is None), drain_s(promise, requests)
    until_s = min(count / rate + each_s, begin_s + longest_s(requests, each_s))
    unstopped = replace(rig, target=0.0)  # however late requests are
    return [
        simulated.run(
            unstopped, deployment, case, rate, count, promise, seed, until_s, stop_s=count / rate
        )
        for seed in _MORE_SEEDS
    ]


def rough_time(config: PredictionConfig) -> str:
    """For people: about how long it takes, before rates and promises are known."""
    num_loads = len(config.scenarios) + len(config.traces) or 2
    num_rows = num_loads * len(config.promise_factors) * len(config.deployments)
    begins_s = 0.0 if config.calibration else config.calibrate_s + 3 * _START_S
    begins_s += num_rows * _SIMULATED_S / min(num_rows, len(os.sched_getaffinity(0)))
    run_s = max(config.run_s, _SESSIONS_S) + _ANSWER_S
    least_s = begins_s + num_rows * (_START_S + run_s * len(config.loads))
    least = f"this takes at least {least_s / 60:.0f} minutes"
    return f"{least}; how long is said before the first cluster is measured"


def said_time(predicted: Sequence[Ahead]) -> str:
    """For people: how long measuring takes."""
    each = [one.seconds for one in predicted]
    least_s = sum(_START_S + sum(seconds) for seconds in each)
    most_s = least_s + sum(MOST_MORE * max(seconds, default=0.0) for seconds in each)
    num_rates = sum(map(len, each))
    return (
        f"measuring {len(predicted)} clusters at {num_rates} rates: {least_s / 60:.0f} minutes, up "
        f"to {most_s / 60:.0f} if goodputs are not between these"
    )
