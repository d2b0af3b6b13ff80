"""A node whose phases split its cores: which one can, and what each step asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from decode_node.policies.interface import SideBySide, StepPhase
from pdserve import _native
from pdserve.engine.engine import Engine
from pdserve.engine.grammar import GrammarProgress
from pdserve.engine.interface import Sampled, shape_of
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.ranks.hosts import WHOLE_NODE, HostShare
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Lifecycle, Targets
from pdserve.measured.perf_model import PerfModel
from pdserve.node.roles import NodeParts
from pdserve.node.split_cores.demand import RestDemand, StreamDemand
from pdserve.node.split_cores.phases import Phases, check_splits
from pdserve.node.split_cores.steps import SplitSteps
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel
from pdserve.protocol import NodeRole, Prompt, SamplingParams, StepCosts
from pdserve.rules.cores import Slowdowns
from pdserve.settings.config import NodeConfig
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ConfigError, NodeSick
from tests.fakes.runner import FakeRunner, Observer, decode_policy
from tests.requests import make_request

D = NodeRole.DECODE
BLOCK = 4
TWO = CorePlan(2, (0, 1), (0, 1))


def fake_model(device: str = "cpu", share: HostShare = WHOLE_NODE) -> NodeModel:
    return cast("NodeModel", SimpleNamespace(device=torch.device(device), share=share))


def test_only_a_decode_node_on_a_cpu_with_a_thread_on_each_core_splits_its_cores() -> None:
    config = NodeConfig(multiplexed=True)
    with pytest.raises(ConfigError, match="multiplexed: for decode nodes"):
        check_splits(config, NodeRole.PREFILL, TWO, fake_model())
    with pytest.raises(ConfigError, match="not those of cuda:0: leave it out, or ask for device"):
        check_splits(config, D, TWO, fake_model("cuda:0"))
    with pytest.raises(ConfigError, match="not with 2 ranks"):
        check_splits(config, D, TWO, fake_model(share=HostShare(Parallelism(2, 1), 0, ())))
    for plan in (CorePlan(1, (0,), (1,)), CorePlan(3, (0, 1), (0, 1))):
        with pytest.raises(ConfigError, match=f"{plan.num_threads} threads on"):
            check_splits(config, D, plan, fake_model())
    check_splits(config, D, TWO, fake_model())
    check_splits(NodeConfig(), D, CorePlan(1, (0,), (0,)), fake_model("cuda:0"))


# ---- what steps ask for -------------------------------------------------------------------------

COSTS = StepCosts(knot_tokens=[1, 100], knot_s=[0.080 / 7, 0.080 / 7])  # on all cores but one
PROMISED = Targets(tpot_s=0.04)  # so steps of 36 ms are aimed at


class Demanding:
    """A node of 8 cores, on which steps take 80 ms on one, and an eighth of that on all."""

    def __init__(self, num_cores: int = 8) -> None:
        self.clock = ManualClock()
        slowdowns, self.perf = Slowdowns.proportional(num_cores), PerfModel(COSTS)
        self.demand = StreamDemand(self.perf, slowdowns, num_cores, self.clock, 0.25)

    def stream(self, due_in_s: float = 1.0, targets: Targets = PROMISED) -> Scheduled:
        """A stream whose next token is due then."""
        gap_s = min(targets.tpot_s, 0.25)
        lifecycle = Lifecycle(received_s=0.0)
        lifecycle.first_token_s = self.clock.now() + due_in_s - gap_s
        request = Request(
            request_id="r",
            prompt=Prompt([1] * 10),
            sampling=SamplingParams(max_tokens=100),
            lifecycle=lifecycle,
            output_token_ids=[1],
            num_computed_tokens=10,
            targets=targets,
        )
        return Scheduled(request, 1)


def test_streams_get_the_cores_that_their_tpot_needs() -> None:
    bench = Demanding()
    assert bench.demand.cores([bench.stream()]) == 3  # 80 / 3 ms; 40 would be too slow
    assert bench.demand.cores([bench.stream(targets=Targets())]) == 1  # the default: 250 ms
    assert bench.demand.cores([bench.stream(targets=Targets(tpot_s=0.001))]) == 7
    both = [bench.stream(targets=Targets()), bench.stream()]
    assert bench.demand.cores(both) == 3


def test_a_stream_that_is_behind_gets_more() -> None:
    bench = Demanding()
    assert bench.demand.cores([bench.stream(due_in_s=0.021)]) == 4
    assert bench.demand.cores([bench.stream(due_in_s=0.011)]) == 7
    assert bench.demand.cores([bench.stream(due_in_s=-1.0)]) == 7


def test_two_cores_leave_no_choice() -> None:
    two = Demanding(2)
    assert two.demand.cores([two.stream(due_in_s=-1.0)]) == 1


def test_decodes_are_predicted_as_if_they_had_asked_for_all_cores_but_one() -> None:
    demand = Demanding().demand
    assert [demand.slowdown(asked, asked) for asked in (7, 4, 1)] == pytest.approx([1, 7 / 4, 7])
    assert [demand.slowdown(asked, 8.0) for asked in (7, 4, 1)] == [1.0] * 3, "nobody beside them"
    assert demand.slowdown(4, 6.0) == pytest.approx(7.5 / 6), "half of the time"
    assert demand.slowdown(4, 0.0) == 1.0, "nothing was computed"
    two = Demanding(2).demand
    assert [two.slowdown(1, cores) for cores in (1.0, 1.3, 2.0)] == pytest.approx([1.0] * 3)
    assert RestDemand().slowdown(1, 1.0) == 1.0, "prompts are predicted as they are"


def test_steps_that_take_longer_than_profiled_need_more() -> None:
    bench = Demanding()
    row = bench.stream()
    assert bench.demand.cores([row]) == 3
    for _ in range(50):
        bench.perf.observe(shape_of([row]), 2 * 0.080 / 7)
    assert bench.demand.cores([row]) == 5


@pytest.mark.parametrize(("num_cores", "tpot_s", "needed"), [(8, 0.04, 3), (3, 0.0245, 2)])
def test_what_decodes_ask_for_does_not_depend_on_how_many_prompts_there_were(
    num_cores: int, tpot_s: float, needed: int
) -> None:
    """Although their steps are predicted beside as many prompts as lately."""
    bench = Demanding(num_cores)
    row = bench.stream(targets=Targets(tpot_s=tpot_s))
    one_core_s = COSTS.knot_s[0] * (num_cores - 1)
    predicted_s = []
    for is_alone in (True, False, True, False):
        for _ in range(60):
            asked = bench.demand.cores([row])
            assert asked == needed
            cores = num_cores if is_alone else asked
            seconds = one_core_s / cores / bench.demand.slowdown(asked, cores)
            bench.perf.observe(shape_of([row]), seconds)
        predicted_s.append(bench.perf.step_s(shape_of([row])))
    alone_s, beside_s = one_core_s / num_cores, one_core_s / (num_cores - 1)
    assert predicted_s == pytest.approx([alone_s, beside_s] * 2, rel=0.05)


# ---- steps ---------------------------------------------------------------------------------------


class Echo:
    """A runner that notes how many cores it had."""

    model_s = 1.5
    launcher = None

    def __init__(self, share: _native.CoreShare) -> None:
        self.share = share
        self.allowed: list[int] = []
        self.foreseen: list[Sequence[Scheduled]] = []

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], Sampled]:
        def compute() -> Sampled:
            self.allowed.append(self.share.allowed)
            return [None] * len(rows)

        return compute

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        self.foreseen.append(rows)


class Fixed:
    """A demand of three cores."""

    def cores(self, rows: Sequence[Scheduled]) -> int:
        return 3

    def slowdown(self, asked: int, mean_cores: float) -> float:
        return asked + mean_cores


def test_a_step_asks_before_it_begins() -> None:
    asking, resting = _native.split_cores(4)
    runner, rows = Echo(asking), [Demanding().stream()]
    steps = SplitSteps(runner, asking, Fixed())
    resting.ask(RestDemand().cores(rows))
    compute = steps.prepare(rows)
    assert resting.allowed == 1
    assert compute() == [None]
    assert runner.allowed == [3]
    assert (steps.mean_cores, steps.share, steps.slowdown()) == (0, 0, 3), (
        "it has called no kernels"
    )
    steps.foresee(rows)
    assert (runner.foreseen, steps.model_s) == ([rows], 1.5)


# ---- both loops ----------------------------------------------------------------------------------


class Pair(FakeRunner):
    """A runner, and the one beside it."""

    def __init__(self) -> None:
        super().__init__(BLOCK)
        self.other = FakeRunner(BLOCK)

    def beside(self, grammars: GrammarProgress) -> FakeRunner:
        return self.other


class Bench:
    """Both phases of a node of four cores."""

    def __init__(self) -> None:
        clock, self.runner = ManualClock(), Pair()
        self.pool = BlockPool(20, BLOCK)
        policy = decode_policy(16, 8)
        assert isinstance(policy, SideBySide)
        self.engine = Engine(Queues(self.pool, clock), StepPhase(policy.plan_decodes), frozenset())
        self.prompt_engine = Engine(
            self.engine.queues, StepPhase(policy.plan_prompts), frozenset(), beside=self.engine
        )
        parts = SimpleNamespace(
            config=NodeConfig(multiplexed=True),
            perf=PerfModel(COSTS),
            clock=clock,
            max_model_len=100,
            engine=self.engine,
        )
        self.phases = Phases(
            cast("NodeParts", parts),
            self.prompt_engine,
            CorePlan(4, (0, 1, 2, 3), (0, 1, 2, 3)),
            cast("ModelRunner", self.runner),
            Slowdowns.proportional(4),
        )


@pytest.mark.parametrize("failing", ["prompts", "decodes"])
async def test_if_one_loop_fails_the_other_one_ends_with_its_step(failing: str) -> None:
    bench, observer = Bench(), Observer()
    runner = bench.runner.other if failing == "prompts" else bench.runner
    runner.error = NodeSick("the machine is broken")
    bench.engine.submit(make_request(5, max_tokens=3))
    async with asyncio.timeout(30):
        with pytest.raises(NodeSick, match="the machine is broken"):
            await bench.phases.run(observer)
        while bench.engine.has_thread or bench.prompt_engine.has_thread:
            await asyncio.sleep(0)
    bench.phases.close()


async def test_of_each_step_it_is_known_what_it_had() -> None:
    bench, observer = Bench(), Observer()
    request = make_request(5, max_tokens=2)
    bench.engine.submit(request)
    running = asyncio.create_task(bench.phases.run(observer))
    await observer.until(lambda: request.request_id in observer.done)
    steps = [bench.phases.last_steps(report) for report in observer.reports]
    assert steps == [bench.phases.prompts, bench.phases.decodes]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    bench.phases.close()
