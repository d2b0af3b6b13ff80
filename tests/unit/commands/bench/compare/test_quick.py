"""Ten minutes of a comparison, on machines of any speed: simulated servers, and a manual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from pdserve.commands.bench.compare.cases import CompareCase
from pdserve.commands.bench.compare.comparison import compare
from pdserve.commands.bench.compare.config import CompareConfig
from pdserve.commands.bench.compare.goodput import RatePoint
from pdserve.commands.bench.compare.rates import is_worth
from pdserve.commands.bench.compare.report import CompareReport, Unloaded
from pdserve.commands.bench.compare.runner import (
    Candidate,
    CandidateRunner,
    Experiment,
    ModeServer,
    RunRecord,
    drain_s,
    unloaded_of,
)
from pdserve.commands.bench.load.outcome import Outcome, Promise
from pdserve.commands.bench.load.workload import Sketch, TimedRequest
from pdserve.shared.clock import ManualClock
from tests.fakes.server import FakeServer

_START_S = 8.0  # of a cluster
_TOKENS = 20


@dataclass
class Arrivals:
    """Poisson arrivals of equal requests, without tokens."""

    seed: int
    block_tokens: int = 16

    def sketched(self, rate: float, count: int, turn: int = 0) -> Iterator[Sketch]:
        raise NotImplementedError

    def timed(
        self, rate: float, count: int, turn: int = 0, contents: int = 0
    ) -> list[TimedRequest]:
        gaps = np.random.default_rng([self.seed, turn]).exponential(size=count)
        at = (gaps.cumsum() - gaps[0]) * count / gaps.sum() / rate
        return [TimedRequest(at_s, "chat", [], _TOKENS) for at_s in at.tolist()]

    def first(self, count: int) -> list[TimedRequest]:
        return [TimedRequest(0.0, "chat", [], _TOKENS)] * count


@dataclass
class Machine:
    """Serves so many requests per second in each mode, one after the other."""

    per_s: dict[str, float]
    ttft_s: float = 0.2
    tpot_s: float = 0.01
    clock: ManualClock = field(default_factory=ManualClock)
    told: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def launch(
        self, candidate: Candidate, promise: Promise | None
    ) -> AsyncIterator[ModeServer]:
        self.clock.advance(_START_S)
        yield FakeServer()

    def outcomes(self, mode: str, requests: Sequence[TimedRequest]) -> list[Outcome]:
        free_s, made = 0.0, []
        for request in requests:
            free_s = max(request.at_s, free_s) + 1 / self.per_s[mode]
            first_s = free_s + self.ttft_s
            arrivals_s = [first_s, first_s + self.tpot_s * (_TOKENS - 1)]
            made.append(
                Outcome(
                    kind="chat",
                    due_s=request.at_s,
                    sent_s=request.at_s,
                    num_prompt=1,
                    num_output=_TOKENS,
                    arrivals_s=arrivals_s,
                    num_received=_TOKENS,
                    end="finished",
                )
            )
        return made


class Simulated(CandidateRunner):
    """Runs of a machine, which take their time by its clock."""

    machine: Machine

    async def warm_up(self, requests: Sequence[TimedRequest]) -> None:
        self.machine.clock.advance(1.0)

    async def unloaded(
        self, alone: Sequence[TimedRequest], together: Sequence[TimedRequest]
    ) -> Unloaded:
        mode = self.candidate.mode
        of_each = [self.machine.outcomes(mode, [request])[0] for request in alone]
        burst = self.machine.outcomes(mode, together)
        self.machine.clock.advance(sum(o.e2e_s for o in of_each) + burst[-1].e2e_s)
        return unloaded_of(of_each, burst)

    async def at_rate(
        self,
        what: str,
        requests: Sequence[TimedRequest],
        rate: float,
        promise: Promise,
        *,
        beside_itself: bool = False,
        turn: int = 0,
    ) -> RunRecord:
        outcomes = self.machine.outcomes(self.candidate.mode, requests)
        ends_s = max(outcome.arrivals_s[-1] for outcome in outcomes)
        self.machine.clock.advance(min(ends_s, requests[-1].at_s + drain_s(promise, requests)))
        return RunRecord(
            what, "", self.candidate.mode, None, rate, outcomes, beside_itself, 1.0, 0.1, turn
        )


class SimulatedExperiment(Experiment):
    machine: Machine

    async def begin(
        self, server: ModeServer, candidate: Candidate, case: CompareCase
    ) -> CandidateRunner:
        runner = Simulated(server, candidate, case.name, self.keep)
        runner.machine = self.machine
        await runner.warm_up([])
        return runner


async def ten_minutes(machine: Machine, seed: int = 0) -> CompareReport:
    experiment = SimulatedExperiment(
        plan=CompareConfig(quick=True).plan,
        launch=machine.launch,
        clock=machine.clock,
        keep=lambda record: None,
        tell=machine.told.append,
        failures={},
    )
    object.__setattr__(experiment, "machine", machine)
    report = CompareReport([], [], experiment.failures, {})

    def cases(max_model_len: int) -> list[CompareCase]:
        names = enumerate(("first", "second"))
        return [CompareCase(name, "", Arrivals(seed + n), 3.0, 2.0, 1, 1.0) for n, name in names]

    await compare(experiment, cases, report)
    return report


def machine(scale: float, colocated: float) -> Machine:
    per_s = {"disaggregated": scale, "colocated": colocated * scale, "adaptive": scale}
    return Machine(per_s, ttft_s=max(0.05, 1 / scale))


@pytest.mark.parametrize("scale", [20.0, 100.0])
async def test_each_mode_is_measured_on_both_sides_of_its_own_crossing(scale: float) -> None:
    """Though one takes four times as much as the others."""
    fast = machine(scale, 4.0)
    report = await ten_minutes(fast)
    assert fast.clock.now() < 600
    for mode in report.modes:
        breaks = fast.per_s[mode.mode]
        assert mode.goodput_is == "crossing"
        assert 0.4 * breaks < mode.goodput < 1.2 * breaks
    for scenario in report.scenarios:
        assert {verdict.server for verdict in scenario.verdicts} == {"colocated"}
        assert any(verdict.is_certain for verdict in scenario.verdicts)


@pytest.mark.parametrize("colocated", [0.5, 1.05, 4.0])
async def test_a_slow_machine_has_ten_minutes_too(colocated: float) -> None:
    slow = machine(2.0, colocated)
    report = await ten_minutes(slow)
    assert slow.clock.now() < 600
    assert all(mode.rows for mode in report.modes)


def test_a_run_that_can_tell_nothing_is_left_out() -> None:
    points = [RatePoint(1.0, {"chat": (100, 100)}), RatePoint(4.0, {"chat": (10, 100)})]
    assert [is_worth(points, rate, 0.9) for rate in (0.5, 1, 2, 4, 5)] == [0, 1, 1, 1, 0]
    few = [RatePoint(1.0, {"chat": (4, 4)}), RatePoint(4.0, {"chat": (3, 4)})]
    assert all(is_worth(few, rate, 0.9) for rate in (0.5, 2, 5)), "these may be chance"
