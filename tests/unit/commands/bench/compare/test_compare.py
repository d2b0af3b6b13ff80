"""The whole comparison, with servers that only pretend: who is measured when, and what follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from pdserve.commands.bench.compare import interference
from pdserve.commands.bench.compare.cases import CompareCase, made_up
from pdserve.commands.bench.compare.comparison import compare, promise_of
from pdserve.commands.bench.compare.config import ComparePlan, Tuning
from pdserve.commands.bench.compare.report import (
    CompareReport,
    ModeReport,
    RateRow,
    ScenarioReport,
    Unloaded,
)
from pdserve.commands.bench.compare.runner import (
    Candidate,
    Experiment,
    ModeServer,
    RunRecord,
    rate_row,
)
from pdserve.commands.bench.load.outcome import Outcome, Percentiles, Promise
from pdserve.commands.bench.load.scenarios import ScenarioName
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ClusterError, ConfigError
from tests.fakes.server import Answer, Body, FakeServer, answer_all

NOTHING = Percentiles(0, None, None, None)
FOR_EVER_S = 60.0  # promised: whoever answers is in time
PLAN = ComparePlan(
    modes=["disaggregated", "colocated", "adaptive"],
    tunings=[Tuning(0), Tuning(64)],
    ttft_s=FOR_EVER_S,
    tpot_s=FOR_EVER_S,
    ttft_scale=0.0,
    tpot_scale=0.0,
    target=0.9,
    seed=0,
    rates=[100.0, 200.0],
    duration_s=0.05,
    least_requests=8,
    idle_requests=2,
    warm_up=1,
    budget_s=1e6,
)


def change(plan: ComparePlan, **changes: object) -> ComparePlan:
    return ComparePlan(**{name: getattr(plan, name) for name in plan.__slots__} | changes)  # type: ignore[arg-type]


async def refuse(request: web.Request, body: Body) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no", "code": "overloaded"}}, status=429)


def refuses_in(*names: str) -> Answer:
    """Serves everything but runs of these names, which are part of their salt."""

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        is_refused = any(name in body["cache_salt"] for name in names)
        return await (refuse if is_refused else answer_all)(request, body)

    return answer


@dataclass
class World:
    """Starts fake servers, and remembers everything."""

    answers: dict[Candidate, Answer] = field(default_factory=dict)  # default: all is served
    cannot_start: tuple[str, ...] = ()
    launched: list[tuple[Candidate, Promise | None]] = field(default_factory=list)
    servers: list[FakeServer] = field(default_factory=list)
    kept: list[RunRecord] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    num_running: int = 0
    run_s: float = 0.0  # that each run at a rate takes by the clock
    clock: ManualClock = field(default_factory=ManualClock)
    report: CompareReport | None = None

    @asynccontextmanager
    async def launch(
        self, candidate: Candidate, promise: Promise | None
    ) -> AsyncIterator[ModeServer]:
        if candidate.mode in self.cannot_start:
            raise ClusterError(f"{candidate.mode} has no nodes")
        self.launched.append((candidate, promise))
        async with FakeServer(self.answers.get(candidate, answer_all)).running() as server:
            self.servers.append(server)
            self.num_running += 1
            try:
                yield server
            finally:
                self.num_running -= 1

    def experiment(self, plan: ComparePlan = PLAN) -> Experiment:
        return Experiment(
            plan=plan,
            launch=self.launch,
            clock=self.clock,
            keep=self.kept.append,
            tell=self.tell,
            failures={},
        )

    def tell(self, text: str) -> None:
        self.told.append(text)
        if text.endswith("s left"):
            self.clock.advance(self.run_s)

    async def run(
        self, plan: ComparePlan = PLAN, scenario: ScenarioName = "short-prompts"
    ) -> tuple[dict[str, ModeReport], ScenarioReport, dict[str, str]]:
        experiment = self.experiment(plan)

        def cases(max_model_len: int) -> list[CompareCase]:
            return [made_up(scenario, max_model_len, 0.1, plan.seed)]

        report = CompareReport([], [], experiment.failures, {})
        try:
            await compare(experiment, cases, report)
        finally:
            assert self.num_running == 0
            self.report = report
        (scenario,) = report.scenarios
        return {mode.mode: mode for mode in report.modes}, scenario, experiment.failures


async def test_every_mode_sees_the_same_requests_at_every_rate_in_turns() -> None:
    """And no two runs of a server share prefixes."""
    world = World()
    modes, report, failures = await world.run()
    assert failures == {}
    assert report.rates == [100.0, 200.0]
    seen: set[tuple[tuple[float, int, int], ...]] = set()
    for rate in report.rates:
        runs = [record for record in world.kept if (record.what, record.rate) == ("rate", rate)]
        assert {record.mode for record in runs} == {"disaggregated", "colocated", "adaptive"}
        sent = {
            beside: {
                tuple((o.due_s, o.num_prompt, o.num_output) for o in r.outcomes)
                for r in runs
                if r.beside_itself is beside
            }
            for beside in (False, True)
        }
        assert len(sent[False]) == len(sent[True]) == 1
        assert sent[False] != sent[True], "of A/A, the second run has others"
        seen |= sent[False]
    assert len(seen) == len(report.rates), "each rate has its own"
    prompts = [
        {str(body["prompt"]) for body in server.bodies if "-rate-" in body["cache_salt"]}
        for server in world.servers[-3:]
    ]
    assert prompts[0] > prompts[1] == prompts[2]  # of A/A, the second run has others
    for mode in modes.values():
        assert {(row.rate, row.score.attainment) for row in mode.rows} == {(100, 1.0), (200, 1.0)}
        assert (mode.goodput, mode.goodput_is) == (200.0, "above the rates")
        assert all(row.prefilled_on == {"p": row.score.sent} for row in mode.rows)
    for server in world.servers:
        seen: dict[str, set[str]] = {}
        for body in server.bodies:
            seen.setdefault(body["cache_salt"], set()).add(str(body["prompt"]))
        assert sum(len(prompts) for prompts in seen.values()) == len(server.bodies)
    order = [record.mode for record in world.kept if record.what == "rate"]
    there = ["disaggregated", "colocated", "adaptive", "disaggregated"]
    assert order == [*there, *reversed(there)]


@pytest.mark.long
async def test_idle_clusters_are_promised_nothing_and_all_others_the_same() -> None:
    world = World()
    _, report, _ = await world.run()
    promises = [promise for _, promise in world.launched]
    assert promises[:3] == [None] * 3
    assert set(promises[3:]) == {report.promise} == {Promise(FOR_EVER_S, FOR_EVER_S)}
    assert report.promise_is == "as given"


async def test_the_tuning_that_serves_best_is_kept() -> None:
    world = World(answers={Candidate("colocated", Tuning(0)): refuse})
    modes, _, _ = await world.run()
    colocated = modes["colocated"]
    tried = [(trial.tuning, trial.score.attainment) for trial in colocated.trials]
    assert tried == [(Tuning(0), 0.0), (Tuning(64), 1.0)]
    assert colocated.tuning == Tuning(64)
    assert colocated.rows[0].score.attainment == 1.0
    assert (Candidate("colocated", Tuning(64)), Promise(FOR_EVER_S, FOR_EVER_S)) == world.launched[
        -2
    ]
    assert modes["disaggregated"].tuning is None


@pytest.mark.long
async def test_one_tuning_needs_no_trial() -> None:
    world = World()
    modes, _, _ = await world.run(change(PLAN, tunings=[Tuning(128, one_node=True)]))
    assert modes["colocated"].trials == []
    assert modes["colocated"].tuning == Tuning(128, one_node=True)


async def test_refusals_are_misses() -> None:
    # The warm-up is its run 1, the first rate runs 2 and 3, the second one 4 and 5.
    world = World(answers={Candidate("disaggregated"): refuses_in("-rate-4", "-rate-5")})
    modes, _, _ = await world.run()
    refused = modes["disaggregated"].rows[-1].score
    assert (refused.attainment, refused.refused, refused.errors) == (
        0.0,
        refused.sent,
        {"429 overloaded": refused.sent},
    )
    assert modes["disaggregated"].goodput == pytest.approx(110.0)  # a tenth of the way down
    assert modes["disaggregated"].goodput_is == "crossing"


async def test_a_mode_that_cannot_start_is_left_out_and_told() -> None:
    modes, _, failures = await World(cannot_start=("adaptive",)).run()
    assert set(modes) == {"disaggregated", "colocated"}
    assert failures == {"adaptive": "adaptive has no nodes"}


async def test_without_any_mode_there_is_nothing_to_report() -> None:
    with pytest.raises(ClusterError, match=r"no mode.*disaggregated: disaggregated has no nodes"):
        await World(cannot_start=("disaggregated", "colocated", "adaptive")).run()


@pytest.mark.long  # one that serves nothing at once is by default
async def test_an_idle_cluster_that_refuses_is_left_out() -> None:
    _, _, failures = await World(answers={Candidate("adaptive"): refuse}).run()
    assert list(failures) == ["adaptive"]
    assert "429 overloaded" in failures["adaptive"]


async def test_no_mode_may_be_left_when_the_rates_begin() -> None:
    world = World()
    launch = world.launch

    @asynccontextmanager
    async def once(candidate: Candidate, promise: Promise | None) -> AsyncIterator[ModeServer]:
        if promise is not None:
            raise ClusterError("it does not start again")
        async with launch(candidate, promise) as server:
            yield server

    world.launch = once  # type: ignore[method-assign]
    modes, report, failures = await world.run()
    assert modes == {}
    assert set(failures) > {"disaggregated", "colocated", "adaptive"}  # and each chunk size
    assert (report.rates, report.stopped) == ([], "no mode is left")


async def test_an_idle_cluster_that_serves_nothing_at_once_is_left_out() -> None:
    _, _, failures = await World(answers={Candidate("adaptive"): refuses_in("burst")}).run()
    assert list(failures) == ["adaptive"]
    assert "20 simultaneous requests" in failures["adaptive"]


@pytest.mark.long
async def test_a_server_that_does_not_settle_is_left_out() -> None:
    world = World()
    launch = world.launch

    @asynccontextmanager
    async def dying(candidate: Candidate, promise: Promise | None) -> AsyncIterator[ModeServer]:
        async with launch(candidate, promise) as server:
            if candidate.mode == "disaggregated" and promise is not None:
                world.servers[-1].settles = False
            yield server

    world.launch = dying  # type: ignore[method-assign]
    modes, report, failures = await world.run()
    assert set(modes) == {"colocated", "adaptive"}
    assert failures == {"disaggregated": "a request hangs"}
    assert report.rates == [100.0, 200.0]


async def test_no_rate_is_begun_for_which_there_is_no_time() -> None:
    modes, report, _ = await World().run(change(PLAN, budget_s=0.01))
    assert report.rates == [100.0]
    assert report.stopped.startswith("no time for 200/s")
    assert all({row.rate for row in mode.rows} == {100.0} for mode in modes.values())


async def test_an_interrupted_comparison_reports_what_it_has_measured() -> None:
    reached = asyncio.Event()

    async def hang_at_the_second_rate(request: web.Request, body: Body) -> web.StreamResponse:
        if "-rate-3" in body["cache_salt"]:  # its runs are a warm-up and two rates
            reached.set()
            await asyncio.Event().wait()
        return await answer_all(request, body)

    world = World(answers={Candidate("disaggregated"): hang_at_the_second_rate})
    measuring = asyncio.create_task(world.run(change(PLAN, modes=["disaggregated"])))
    await reached.wait()
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    assert world.report is not None
    (mode,), (scenario,) = world.report.modes, world.report.scenarios
    assert [row.rate for row in mode.rows] == scenario.rates == [100.0]
    assert scenario.stopped == "interrupted"


@pytest.mark.long
async def test_the_rates_start_below_what_a_burst_was_served_at() -> None:
    world = World(run_s=1.0)
    modes, report, _ = await world.run(change(PLAN, rates=[], budget_s=7.9))  # two rates
    burst = max(mode.unloaded.burst_per_s for mode in modes.values())
    assert report.rates == pytest.approx([0.6 * burst, 1.2 * burst], rel=1e-3)  # all was in time
    assert report.stopped.startswith("no time for")


@pytest.mark.long
async def test_warm_up_is_kept_but_counts_nowhere() -> None:
    world = World(answers={Candidate("disaggregated"): refuses_in("warm-up")})
    modes, _, failures = await world.run()
    assert failures == {}
    assert any(record.what == "warm-up" for record in world.kept)
    assert modes["disaggregated"].rows[0].score.attainment == 1.0


async def test_streams_are_disturbed_where_the_scenario_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interference, "FIRST_S", 0.0)
    monkeypatch.setattr(interference, "EVERY_S", 0.0)
    plan = change(PLAN, modes=["disaggregated"], rates=[100.0])
    world = World()
    modes, _, _ = await world.run(plan, "long-prompts")
    assert [c.refuses for c, promise in world.launched if promise] == [False, True]
    found = modes["disaggregated"].interference
    assert found is not None
    assert (found.streams_finished, found.prompts_finished) == (8, 3)
    assert found.p99_ratio is not None


def unloaded(slowest_ttft_s: float, median_tpot_s: float) -> Unloaded:
    return Unloaded(5, NOTHING, NOTHING, NOTHING, slowest_ttft_s, median_tpot_s, 5, 10.0)


def test_promises_are_multiples_of_the_best_idle_figures() -> None:
    case = made_up("long-prompts", 8192, 0.0, 0)
    subject_scales = (case.ttft_scale, case.tpot_scale)
    idle = [unloaded(1.0, 0.004), unloaded(2.0, 0.003)]
    free = change(PLAN, ttft_s=0.0, tpot_s=0.0)
    promise, promise_is = promise_of(free, case, idle)
    assert promise.ttft_s == pytest.approx(subject_scales[0] * 1.0)
    assert promise.tpot_s == pytest.approx(subject_scales[1] * 0.003)
    assert promise_is.startswith("TTFT 3 times the slowest")
    promise, promise_is = promise_of(change(free, tpot_s=0.5, ttft_scale=10.0), case, idle)
    assert promise == Promise(10.0, 0.5)
    assert "TPOT" not in promise_is


def test_answers_of_one_token_promise_no_tpot() -> None:
    case = made_up("short-prompts", 8192, 0.0, 0)
    free = change(PLAN, ttft_s=0.0, tpot_s=0.0)
    with pytest.raises(ConfigError, match=r"short-prompts: .*most answers are one token.*--tpot-s"):
        promise_of(free, case, [unloaded(1.0, 0.0)])
    assert promise_of(change(free, tpot_s=0.5), case, [unloaded(1.0, 0.0)])[0].tpot_s == 0.5


def test_a_row_says_whether_its_client_kept_up() -> None:
    def row(late_s: float, lag_s: float = 0.001, ttft_s: float = 1.0) -> RateRow:
        outcome = Outcome(
            kind="chat",
            due_s=1.0,
            sent_s=1.0 + late_s,
            num_prompt=1,
            num_output=2,
            arrivals_s=[2.0, 2.5],
            num_received=2,
            end="finished",
        )
        idle = Unloaded(1, NOTHING, NOTHING, Percentiles(9, 100.0, 100.0, 250.0), 1.0, 0.1, 1, 1.0)
        promise = Promise(ttft_s, 1.0)
        run = RunRecord("rate", "", "", None, 3.0, [outcome], False, 1e3 * lag_s, 0.25)
        return rate_row(run, idle, promise, 0.9)

    assert row(0.01).client_kept_up
    assert not row(0.2).client_kept_up
    assert not row(0.01, lag_s=0.2).client_kept_up  # in receiving
    assert not row(0.01, ttft_s=0.05).client_kept_up  # a fifth of what was promised
    assert row(0.01).client_core_share == 0.25
    assert row(0.01).client_lag_p99_ms == pytest.approx(1.0)
    assert row(0.01).itl_p99_vs_unloaded == pytest.approx(2.0)
