"""`bench compare --quick` on machines of any speed, on a manual clock: it ends with an answer."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from math import exp
from typing import Any

import msgspec
import numpy as np
import pytest

from pdserve.commands.bench.compare.cases import CompareCase, made_up
from pdserve.commands.bench.compare.comparison import compare
from pdserve.commands.bench.compare.config import CompareConfig
from pdserve.commands.bench.compare.lengths import fitted
from pdserve.commands.bench.compare.report import CompareReport, Unloaded
from pdserve.commands.bench.compare.run import case_maker
from pdserve.commands.bench.compare.runner import (
    Candidate,
    CandidateRunner,
    Experiment,
    ModeServer,
    RunRecord,
    drain_s,
    unloaded_of,
)
from pdserve.commands.bench.compare.shown.verdict import Verdict
from pdserve.commands.bench.load.outcome import Outcome, Promise
from pdserve.commands.bench.load.workload import TimedRequest
from pdserve.shared.clock import ManualClock
from tests.matrix import matrix
from tests.unit.commands.bench.compare.made_reports import unloaded

TEN_MINUTES_S = 600.0
START_S = 4.0  # that a cluster takes to start
PROMPT_S = 1 / 2000  # a token of a prompt at speed 1,
STEP_S = 0.004  # and a decode step of one stream; eight take twice as long
CAPACITY_PER_S = {"short-prompts": 25.0, "long-prompts": 10.0}  # at speed 1
NOISE = 0.03  # of a machine's speed from run to run


@dataclass
class Server:
    """Nodes that take turns; each computes prompts in turn, and all its streams together."""

    speed: float
    num_nodes: int = 1

    def serve(self, requests: Sequence[TimedRequest], until_s: float) -> list[Outcome]:
        outcomes = [self._alone(requests[n :: self.num_nodes], until_s) for n in self._nodes]
        return sorted(chain.from_iterable(outcomes), key=lambda outcome: outcome.due_s)

    @property
    def _nodes(self) -> range:
        return range(self.num_nodes)

    def _alone(self, requests: Sequence[TimedRequest], until_s: float) -> list[Outcome]:
        free_s, ends, outcomes = 0.0, list[float](), list[Outcome]()
        for request in requests:
            free_s = max(free_s, request.at_s) + len(request.prompt) * PROMPT_S / self.speed
            while ends and ends[0] <= free_s:
                heapq.heappop(ends)
            each_s = STEP_S / self.speed * (1 + len(ends) / 8)
            end_s = free_s + each_s * (request.num_output - 1)
            heapq.heappush(ends, end_s)
            outcomes.append(
                Outcome(
                    kind=request.kind,
                    due_s=request.at_s,
                    num_prompt=len(request.prompt),
                    num_output=request.num_output,
                    arrivals_s=[free_s, end_s] if end_s <= until_s else [],
                    num_received=request.num_output,
                    end="finished" if end_s <= until_s else "unfinished",
                    digest=f"{request.kind} {request.prompt[:4]}",
                    format="one",
                )
            )
        return outcomes


@dataclass
class Runner(CandidateRunner):
    """What measures a server, by the clock."""

    server: Server
    candidate: Candidate
    clock: ManualClock
    rng: np.random.Generator
    warmed: Sequence[Outcome] = ()

    def _serve(self, requests: Sequence[TimedRequest], until_s: float = 1e9) -> list[Outcome]:
        noisy = replace(self.server, speed=self.server.speed * exp(self.rng.normal(0, NOISE)))
        outcomes = noisy.serve(requests, until_s)
        self.clock.advance(max(max(o.arrivals_s, default=until_s) for o in outcomes))
        return outcomes

    async def unloaded(
        self, alone: Sequence[TimedRequest], together: Sequence[TimedRequest]
    ) -> Unloaded:
        one_by_one = [outcome for request in alone for outcome in self._serve([request])]
        return unloaded_of(one_by_one, self._serve(together))

    async def at_rate(
        self,
        what: str,
        requests: Sequence[TimedRequest],
        rate: float,
        promise: Promise,
        *,
        turn: int = 0,
        beside_itself: bool = False,
    ) -> RunRecord:
        until_s = requests[-1].at_s + drain_s(promise, requests)
        outcomes, name = self._serve(requests, until_s), self.candidate.mode
        return RunRecord(what, "", name, None, rate, outcomes, beside_itself, turn=turn)


@dataclass(frozen=True)
class Measured(Experiment):
    """An experiment with such servers."""

    servers: dict[str, Server] = field(default_factory=dict)
    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    async def begin(self, server: ModeServer, candidate: Candidate, case: Any) -> CandidateRunner:
        assert isinstance(self.clock, ManualClock)
        return Runner(self.servers[candidate.mode], candidate, self.clock, self.rng)


async def measured(
    speed: float, times: float, seed: int, *scenarios: str, num_nodes: tuple[int, int] = (1, 1)
) -> CompareReport:
    """Compare three modes, of which the first one is so many times as fast as the others.

    `num_nodes`: of the first one, and of the others.
    """
    clock = ManualClock()
    config = CompareConfig(quick=True, scenarios=[*scenarios], seed=seed)  # type: ignore[list-item]

    @asynccontextmanager
    async def launch(candidate: Candidate, promise: Promise | None) -> AsyncIterator[ModeServer]:
        clock.advance(START_S)
        yield LaunchedServer()

    servers: dict[str, Server] = dict.fromkeys(config.modes, Server(speed, num_nodes[1]))
    servers[config.modes[0]] = Server(speed * times, num_nodes[0])
    experiment = Measured(
        plan=config.plan,
        launch=launch,
        clock=clock,
        keep=lambda record: None,
        tell=lambda text: None,
        failures={},
        servers=servers,
        rng=np.random.default_rng(seed),
    )
    report = CompareReport([], [], experiment.failures, {})
    await compare(experiment, case_maker(config), report)
    assert clock.now() < TEN_MINUTES_S
    return report


class LaunchedServer:
    """Nobody asks it anything but its length."""

    url = model = ""
    max_model_len = 8192

    async def settle(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


def is_answered(verdict: Verdict) -> bool:
    """Whether it says who is better, or that nobody is by as much as a factor of 1.3."""
    ratio = verdict.ratio
    return verdict.is_certain or (ratio is not None and 1 / 1.3 < ratio.low < ratio.high < 1.3)


@pytest.mark.parametrize(
    ("per_s", "times", "scenario"),
    matrix(
        [
            (per_s, times, scenario)
            for per_s in (0.5, 10.0, 100.0)
            for times in (1.25, 1.0)
            for scenario in ("short-prompts", "long-prompts")
        ]
        + [(500.0, 1.25, "short-prompts")],
        1,
    ),
)
async def test_ten_minutes_tell_on_a_machine_of_any_speed(
    per_s: float, times: float, scenario: str
) -> None:
    report = await measured(per_s / CAPACITY_PER_S[scenario], times, 0, scenario)
    (found,) = report.scenarios
    assert all(mode.goodput_is == "crossing" for mode in report.modes)
    assert all(map(is_answered, found.verdicts))
    assert found.noise is not None
    assert found.noise.ratio is not None
    if times > 1:
        assert {verdict.server for verdict in found.verdicts} == {"disaggregated"}
    if per_s < 10:
        assert found.length_factor < 0.1
    elif per_s > 100:
        assert found.length_factor == 1.0


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("speed", "num_nodes", "scenario"),
    [(0.4, (50, 1), "long-prompts"), (0.02, (1, 50), "short-prompts")],
)
async def test_crossings_are_found_however_far_apart_they_are(
    speed: float, num_nodes: tuple[int, int], scenario: str
) -> None:
    report = await measured(speed, 1.0, 0, scenario, num_nodes=num_nodes)
    (found,), goodputs = report.scenarios, [mode.goodput for mode in report.modes]
    assert all(mode.goodput_is == "crossing" for mode in report.modes)
    assert 40 < max(goodputs) / min(goodputs) < 70
    assert all(map(is_answered, found.verdicts))
    assert found.noise is not None
    assert found.noise.ratio is not None


async def test_who_is_worse_for_certain_is_measured_no_further() -> None:
    """The time is for those that are still to be told apart."""
    numbers = []
    for times in (2.0, 1.0):
        report = await measured(0.4, times, 0, "short-prompts")
        assert all(map(is_answered, report.scenarios[0].verdicts))
        numbers.append(sum(len(m.rows) for m in report.modes if m.mode != "disaggregated"))
    assert numbers[0] < 0.7 * numbers[1]


async def test_however_slow_it_is_answers_keep_tokens_for_a_tpot() -> None:
    async def measure(case: CompareCase) -> Unloaded:
        return msgspec.structs.replace(unloaded(), burst_per_s=1e-3)

    plan = CompareConfig(quick=True).plan
    for name, shortest in (("short-prompts", 1 / 32), ("conversation", 1 / 8)):
        case, _ = await fitted(plan, made_up(name, 8192, 0.0, 0), 1, measure)
        assert case.length_factor == pytest.approx(shortest, rel=0.1)
        assert np.median([request.num_output for request in case.sample(40)]) >= 2


@pytest.mark.long
async def test_equal_servers_are_seldom_told_apart() -> None:
    verdicts = []
    for seed in range(12):
        report = await measured(0.4, 1.0, seed, "conversation")
        verdicts += report.scenarios[0].verdicts
    assert sum(verdict.is_certain for verdict in verdicts) <= 1
