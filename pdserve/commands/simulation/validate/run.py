"""`pdserve bench prediction`: how far predictions are from what clusters do.

Both get the same requests at the same times, and are scored by the same code. Rates are shares of
the *predicted* goodput, so a prediction that is far off shows as attainments far apart.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final, NamedTuple

import aiohttp

from pdserve.commands.bench.checkpoints.named import checkpoint_of
from pdserve.commands.bench.compare.cases import CompareCase
from pdserve.commands.bench.compare.clusters import RunningServer, together
from pdserve.commands.bench.compare.goodput import RatePoint, crossing
from pdserve.commands.bench.compare.runner import drain_s
from pdserve.commands.bench.cpu_time import busy_seconds, cpu_seconds
from pdserve.commands.bench.load.open_loop import OpenLoopClient, open_loop_client
from pdserve.commands.bench.load.outcome import Percentiles, Promise
from pdserve.commands.bench.load.scenarios import ScenarioName
from pdserve.commands.bench.load.slo_score import Score, score
from pdserve.commands.bench.output import print_json, print_tables, say
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.scrape import scrape
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.commands.simulation.calibrate import run as calibrating
from pdserve.commands.simulation.calibrate.config import CalibrateConfig
from pdserve.commands.simulation.calibrate.drive import Driver
from pdserve.commands.simulation.calibrate.samples import READ_S, NodeReader
from pdserve.commands.simulation.predict import deployment as simulated
from pdserve.commands.simulation.predict.answer import load_calibration
from pdserve.commands.simulation.predict.deployment import Deployment, Rig
from pdserve.commands.simulation.predict.load import (
    Question,
    most_tokens,
    rows_of,
    turn_at,
)
from pdserve.commands.simulation.predict.parallel import in_parallel
from pdserve.commands.simulation.predict.parts import Parts
from pdserve.commands.simulation.validate.ahead import (
    MOST_MORE,
    PACE_S,
    Ahead,
    Asked,
    Paced,
    ahead,
    at_pace,
    count_of,
    promises_of,
    rig_for,
    rough_time,
    said_time,
)
from pdserve.commands.simulation.validate.config import PredictionConfig
from pdserve.commands.simulation.validate.parts import pace_of, parts_of
from pdserve.commands.simulation.validate.regret import regret_table, regrets_of
from pdserve.commands.simulation.validate.report import PredictionReport, parts_table, table
from pdserve.commands.simulation.validate.row import Figures, Row, known_of, points_of
from pdserve.measured.calibration import Calibration
from pdserve.settings.config import CheckpointConfig, RoutingConfig
from pdserve.shared.errors import ConfigError, PdserveError
from pdserve.shared.process.exit_codes import FAILED, FORCED, OK

_SCENARIOS: Final[list[ScenarioName]] = ["long-prompts", "conversation"]
_WARM_UP, _WARM_UP_S = 4, 60.0  # requests
_FURTHER = 1.4  # factor to a rate beyond those that were asked for
_MANY = 4096  # requests on the nodes


class _Measured(NamedTuple):
    """What was measured at one rate."""

    score: Score
    parts: Parts
    pace: float | None  # as `Row.pace`
    drift: float
    client_kept_up: bool
    others: float  # as `Row.others`


class _Idle(NamedTuple):
    """A cluster between two runs."""

    driver: Driver
    reader: NodeReader  # that has read it
    calibration: Calibration

    @classmethod
    def of(cls, client: OpenLoopClient, reader: NodeReader, calibration: Calibration) -> _Idle:
        """Return one that nobody else sends anything."""
        kind = reader.kind
        assert kind is not None
        driver = Driver(client, kind.limits, kind.shape.block_size, seed=0)
        return cls(driver, reader, calibration)

    async def pace(self) -> float | None:
        """Return what steps take now, one request at a time, over what was calibrated."""
        await self.driver.prompts(PACE_S)
        return pace_of(self.calibration, await self.reader.read())


def run(config: PredictionConfig, setup: dict[str, object]) -> int:
    """Predict, measure and print; the exit code.

    Ctrl-C ends it early, and so does a cluster that cannot be measured: what was is printed.

    Raises:
        PdserveError: the settings contradict each other, no case can be measured, or the first
            cluster cannot be.
    """
    deployments = [Deployment(*parsed) for parsed in config.check()]
    for trace in config.traces:
        rows_of(trace, config.seed)  # whether they can be read, before anything is measured
    say(rough_time(config))
    calibration = _calibration(config)
    rig = rig_for(config, calibration)
    asked = [
        Asked(config, calibration, question, deployment, promise)
        for question in _questions(config)
        for promise in promises_of(config, rig, question, deployments)
        for deployment in deployments
    ]
    predicted = _predicted(asked, rig)
    say(said_time(predicted))
    rows, exit_code = _rows(config, rig, predicted)
    # Of the last case, not all deployments may have been measured.
    whole_cases = rows[: len(rows) // len(deployments) * len(deployments)]
    regrets = regrets_of(whole_cases, config.target)
    report = PredictionReport(
        rows=rows, regrets=regrets, errors=calibration.errors, outside=rig.ranges.outside
    )
    if config.json:
        print_json(report, setup)
    else:
        tables = [table(report), parts_table(report)]
        print_tables(tables + [regret_table(regrets)] * bool(regrets), report.remarks)
    return exit_code


def _predicted(asked: Sequence[Asked], rig: Rig) -> list[Ahead]:
    """Predict everything, so that no measurement is in vain, and return what can be measured.

    A case is left out with all its deployments, as regret compares these. Raises as `run`.
    """
    found = dict(in_parallel(ahead, list(enumerate(asked))))
    predicted: list[Ahead] = []
    errors: list[str] = []
    cases: dict[tuple[Question, Promise], list[int]] = {}
    for number, one in enumerate(asked):
        cases.setdefault((one.question, one.promise), []).append(number)
    for numbers in cases.values():
        of_case = [found[number] for number in numbers]
        known = [made for made in of_case if isinstance(made, Ahead)]
        wrong = [why for why in of_case if isinstance(why, str)]
        errors += wrong
        if wrong:
            say(f"left out: {wrong[0]}")
            continue
        for made in known:
            say(f"{made.asked.title}: {made.goodput:.2f}/s")
            rig.ranges.widen(made.outside)
        predicted += known
    if not predicted:
        raise ConfigError(errors[0])
    return predicted


def _rows(config: PredictionConfig, rig: Rig, predicted: Sequence[Ahead]) -> tuple[list[Row], int]:
    """Measure; return what was until an error or Ctrl-C, and the exit code. Raises as `run`."""
    rows: list[Row] = []
    try:
        for one in predicted:
            rows.append(_row(config, rig, one))  # noqa: PERF401 - kept if the next one fails
    except KeyboardInterrupt:
        if not rows:
            raise
        say("interrupted: these are the deployments that were measured until then")
        return rows, FORCED
    except PdserveError as error:
        if not rows:
            raise
        say(f"{error}; these are the deployments that were measured until then")
        return rows, FAILED
    return rows, OK


def _calibration(config: PredictionConfig) -> Calibration:
    if config.calibration:
        return load_calibration(config.calibration)
    asked = CalibrateConfig(
        shape=config.shape, budget_s=config.calibrate_s, seed=config.seed, engine=config.engine
    )
    return calibrating.measured(asked)


def _questions(config: PredictionConfig) -> list[Question]:
    scenarios = config.scenarios or ([] if config.traces else _SCENARIOS)
    made_up = [Question("", scenario, 0.0, config.requests) for scenario in scenarios]
    traces = [Question(trace, "conversation", 0.0, config.requests) for trace in config.traces]
    return made_up + traces


def _row(config: PredictionConfig, rig: Rig, one: Ahead) -> Row:
    """Measure one deployment under one load, beside what was predicted of the same runs."""
    asked, case = one.asked, one.asked.case
    deployment, promise = asked.deployment, asked.promise
    say(f"measuring {asked.title}")
    measured = asyncio.run(
        _measure(config, rig.calibration, deployment, case, list(one.predicted), promise)
    )
    rates = sorted(measured)
    found = [measured[rate] for rate in rates]
    paced = [Paced(replace(asked), rate, measured[rate].pace or 1.0) for rate in rates]
    of_rate = dict(in_parallel(at_pace, paced))
    predicted = [of_rate[rate] for rate in rates]
    return Row(
        load=case.name,
        ttft_s=promise.ttft_s,
        tpot_s=promise.tpot_s,
        deployment=deployment.text,
        rates=rates,
        predicted=[Figures.between([result.score for result in runs]) for runs in predicted],
        predicted_kinds=[[result.score.counts for result in runs] for runs in predicted],
        predicted_ttft_p99=[_tails(runs) for runs in predicted],
        measured=[Figures.of(of.score) for of in found],
        measured_kinds=[of.score.counts for of in found],
        predicted_parts=[Parts.between([result.parts for result in runs]) for runs in predicted],
        measured_parts=[of.parts for of in found],
        client_kept_up=[
            of.client_kept_up and all(run.client_kept_up for run in runs)
            for of, runs in zip(found, predicted, strict=True)
        ],
        others=[of.others for of in found],
        pace=[of.pace for of in found],
        drift=[of.drift for of in found],
        predicted_goodput=one.goodput,
        paced_goodput=_crossed(
            [RatePoint(rate, _added(of_rate[rate])) for rate in rates], config.target
        ),
        measured_goodput=_crossed(_points(measured), config.target),
    )


def _crossed(points: Sequence[RatePoint], target: float) -> float | None:
    at, where = crossing(points, target)
    return at if where == "crossing" else None


def _added(runs: Sequence[simulated.Result]) -> dict[str, tuple[int, int]]:
    """Return the counts of each kind of requests, of all these runs."""
    kinds = [run.score.counts for run in runs]
    return {
        kind: (sum(of[kind][0] for of in kinds), sum(of[kind][1] for of in kinds))
        for kind in kinds[0]
    }


def _tails(runs: Sequence[simulated.Result]) -> tuple[float, float] | None:
    """Return the least and the most TTFT p99 of these runs in milliseconds; None: one has none."""
    tails = known_of(run.score.ttft_ms.p99 for run in runs)
    return (min(tails), max(tails)) if tails else None


async def _measure(
    config: PredictionConfig,
    calibration: Calibration,
    deployment: Deployment,
    case: CompareCase,
    rates: Sequence[float],
    promise: Promise,
) -> dict[float, _Measured]:
    """Start the cluster, and send it the requests at each rate; return what was seen at each.

    While the goodput is not between these, the next rate beyond them is measured, too.
    """
    is_multiplexed = deployment.mode == "multiplexed"  # each node is a prefill and a decode node
    cluster = Cluster(
        ClusterConfig(
            port=0,
            mode=deployment.mode,
            prefill=None if is_multiplexed else deployment.prefill or None,
            decode=deployment.decode,
            max_inflight=_MANY,
            checkpoint=CheckpointConfig(model=checkpoint_of(config.shape)),
            engine=together(config.engine, 2) if is_multiplexed else config.engine,
            routing=RoutingConfig(
                slo_classes=[f"measured ttft={promise.ttft_s:.6f} tpot={promise.tpot_s:.6f}"],
                default_class="measured",
                admission=False,
            ),
        ),
        on_line=lambda _name, _line: None,
    )
    measured: dict[float, _Measured] = {}
    left = list(rates)
    async with cluster as running, aiohttp.ClientSession() as session:
        model = (await running.status()).model
        server = RunningServer(running, model, most_tokens(calibration))
        front = running.url.partition("//")[2]
        pids = [os.getpid(), *map(running.pid, [COORDINATOR, *running.node_names])]
        cores = os.sched_getaffinity(0)

        def used() -> float:
            """Return the CPU seconds of everybody else, since some moment."""
            return busy_seconds(cores) - sum(map(cpu_seconds, pids))

        reader = NodeReader(session, list((await running.metrics_addresses()).values()))
        async with open_loop_client(running.url, model) as client:
            await client.run(case.workload.first(_WARM_UP), "warm-up", _WARM_UP_S)
            await reader.read()
            idle = _Idle.of(client, reader, calibration)
            pace = await idle.pace()
            while left:
                rate = left.pop(0)
                count = count_of(config, case, rate, promise)
                requests = case.workload.timed(rate, count, turn_at(rate))
                before, used_s, began_s = await scrape(front), used(), time.monotonic()
                sent = client.run(
                    requests, f"at-{rate}", drain_s(promise, requests), stop_s=count / rate
                )
                found, recording = await reader.during(sent, READ_S)
                by_others_s = used() - used_s
                seconds = time.monotonic() - began_s
                await server.settle()
                recording.extend(await reader.read())
                parts = parts_of(before, await scrape(front), recording)
                earlier, pace = pace, await idle.pace()
                scored = score(found.outcomes, promise, config.target)
                lag_ms = Percentiles.of(found.lags_s).p99 or 0.0
                measured[rate] = _Measured(
                    scored,
                    parts,
                    *_paces(earlier, pace),
                    promise.is_measured(max(lag_ms, scored.late_ms.p99 or 0.0)),
                    max(0.0, by_others_s / (len(cores) * seconds)),
                )
                if not left and len(measured) < len(rates) + MOST_MORE:
                    left = beyond(_points(measured), config.target)
    return measured


def _paces(*found: float | None) -> tuple[float | None, float]:
    """Return their mean, None if nothing is known, and by which share they differ."""
    paces = [pace for pace in found if pace]
    return (fmean(paces), max(paces) / min(paces) - 1) if paces else (None, 0.0)


def _points(measured: Mapping[float, _Measured]) -> list[RatePoint]:
    return points_of(
        (rate, of.score.counts, of.client_kept_up) for rate, of in sorted(measured.items())
    )


def beyond(points: Sequence[RatePoint], target: float) -> list[float]:
    """Return the rate to measure next, to have the goodput between two; none if it is."""
    rates = [point.rate for point in points]
    _, where = crossing(points, target)
    if where == "above the rates":
        return [max(rates) * _FURTHER]
    return [min(rates) / _FURTHER] if where == "below the rates" else []
