"""A dead or stuck engine is found; a slow one, or one that was stopped, is not taken for one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from msgspec.structs import replace

from pdserve.engine.engine import Engine
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.engine.steps import thread
from pdserve.engine.steps.thread import StepThread
from pdserve.measured.perf_model import CHANGED_STEPS, GUESS, SETTLED_STEPS, PerfModel, StepShape
from pdserve.node.engine_watch import FACTOR, FLOOR_S, LONG_FLOOR_S, TICK_S, EngineWatch
from pdserve.protocol import StepCosts
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import NodeSick
from tests.fakes.runner import FakeRunner, Observer, decode_policy
from tests.requests import make_request
from tests.waits import WITHIN_S, until

STEP_S = 2.0  # predicted, of any step
MEASURED = StepCosts(knot_tokens=[8], knot_s=[STEP_S])
THREE = StepShape(3, 1, prefill_pairs=6)  # tokens of a prompt
LIMIT_S = FACTOR * STEP_S + FLOOR_S


class SilentDog:
    """As `pdserve._native.Watchdog`: finds nothing, but what it is told."""

    def __init__(self, thread: int, clock: int) -> None:
        self.still_s = 0.0
        self.is_started = False

    def expect(self) -> None:
        """There is more to do."""

    def done(self) -> None:
        """There is less."""

    def start(self, tick_s: float, limit_s: float, exit_code: int, signum: int) -> None:
        self.is_started = True

    def stop(self) -> None:
        self.is_started = False


@pytest.fixture(autouse=True)
def no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one does not count a manual clock's time."""
    monkeypatch.setattr(thread, "Watchdog", SilentDog)


class HeldRunner(FakeRunner):
    """Its steps do not end while `may_go` is not set, as native code that hangs."""

    def __init__(self) -> None:
        super().__init__(block_size=4)
        self.may_go = threading.Event()

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        assert self.may_go.wait(WITHIN_S)
        return super().execute(rows, progress)


class Bench:
    """An engine in a step that does not end, and its watch."""

    watch: EngineWatch

    def __init__(self, costs: StepCosts) -> None:
        self.clock, self.runner, self.observer = ManualClock(), HeldRunner(), Observer()
        queues = Queues(BlockPool(64, 4), self.clock)
        self.engine = Engine(queues, decode_policy(8, 4), frozenset())
        self.running = asyncio.create_task(self.engine.run(self.runner, self.observer))
        self.perf = PerfModel(costs)

    def begin(self, *, compiles: bool, is_ranked: bool) -> None:
        self.watch = EngineWatch(
            [self.engine],
            self.running,
            self.perf,
            self.clock,
            compiles=compiles,
            lost_rank=(lambda: "") if is_ranked else None,
        )

    @property
    def dog(self) -> SilentDog:
        dog = self.engine.started_thread().watchdog
        assert isinstance(dog, SilentDog)
        return dog

    def settle(self) -> None:
        """Its steps have been as predicted for a while."""
        for _ in range(SETTLED_STEPS):
            self.perf.observe(THREE, self.perf.step_s(THREE))

    async def begin_step(self, **fields: int) -> None:
        self.engine.submit(make_request(3, max_tokens=1, **fields))
        await until(lambda: self.engine.step is not None)

    def tick(self, after_s: float = TICK_S) -> None:
        self.clock.advance(after_s)
        self.watch.look()

    def ran_until_given_up(self) -> float:
        """Tick in time; how long it took."""
        began_s = self.clock.now()
        with pytest.raises(NodeSick, match=r"^engine_stuck: a step of 1 requests has not ended"):
            self._tick_until(began_s + 10 * LIMIT_S)
        return self.clock.now() - began_s

    def _tick_until(self, end_s: float) -> None:
        while self.clock.now() < end_s:
            self.tick()


@asynccontextmanager
async def running(
    costs: StepCosts = MEASURED, *, compiles: bool = False, is_ranked: bool = False
) -> AsyncIterator[Bench]:
    bench = Bench(costs)
    await until(lambda: bench.engine.has_thread)
    bench.begin(compiles=compiles, is_ranked=is_ranked)
    try:
        yield bench
    finally:
        bench.runner.may_go.set()
        bench.running.cancel()
        await asyncio.gather(bench.running, return_exceptions=True)


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running() as bench:
        yield bench


async def test_a_step_may_take_many_times_as_long_as_predicted_and_no_longer(bench: Bench) -> None:
    """The first one, too: what it costs was measured at the start."""
    await bench.begin_step()
    assert LIMIT_S < bench.ran_until_given_up() <= LIMIT_S + 2 * TICK_S


async def test_a_machine_that_has_changed_gets_no_longer_time(bench: Bench) -> None:
    bench.settle()
    for _ in range(CHANGED_STEPS):
        bench.perf.observe(THREE, 2 * bench.perf.step_s(THREE))
    limit_s = FACTOR * bench.perf.step_s(THREE) + FLOOR_S
    await bench.begin_step()
    assert limit_s < bench.ran_until_given_up() <= limit_s + 2 * TICK_S


@pytest.mark.parametrize("is_tried", [False, True])
async def test_a_guess_is_not_relied_on_before_it_has_been_tried(*, is_tried: bool) -> None:
    """The machine was too busy to profile, or was not to be profiled."""
    async with running(GUESS) as bench:
        if is_tried:
            bench.settle()
        limit_s = FACTOR * bench.perf.step_s(THREE) + (FLOOR_S if is_tried else LONG_FLOOR_S)
        await bench.begin_step()
        assert limit_s < bench.ran_until_given_up() <= limit_s + 2 * TICK_S


async def test_larger_steps_than_were_measured_have_longer() -> None:
    """A large model on few cores had no time for them in its profile."""
    async with running(replace(MEASURED, knot_tokens=[2])) as bench:
        await bench.begin_step()
        assert bench.ran_until_given_up() > LIMIT_S - FLOOR_S + LONG_FLOOR_S


async def test_prompts_that_are_scored_have_longer(bench: Bench) -> None:
    await bench.begin_step(prompt_logprobs=0)
    assert bench.ran_until_given_up() > LIMIT_S - FLOOR_S + LONG_FLOOR_S


async def test_a_step_that_may_compile_kernels_has_longer() -> None:
    async with running(compiles=True) as bench:
        bench.settle()
        await bench.begin_step()
        assert bench.ran_until_given_up() > LIMIT_S - FLOOR_S + LONG_FLOOR_S


async def test_a_thread_that_stands_still_is_found_whatever_it_does(bench: Bench) -> None:
    """It may be in no step at all. Who has heard of it ends the process, and nobody else."""
    dog = bench.dog
    assert dog.is_started
    dog.still_s = FLOOR_S
    bench.tick()
    dog.still_s += TICK_S
    with pytest.raises(NodeSick, match=r"^engine_stuck: its thread has not run for 5\.2 s"):
        bench.tick()
    assert not dog.is_started


@pytest.mark.parametrize(("compiles", "is_ranked"), [(True, False), (False, True)])
async def test_a_thread_may_stand_still_while_others_compute(
    *, compiles: bool, is_ranked: bool
) -> None:
    """A GPU, or other ranks."""
    async with running(compiles=compiles, is_ranked=is_ranked) as bench:
        assert not bench.dog.is_started


async def test_an_idle_engine_is_never_stuck(bench: Bench) -> None:
    for _ in range(int(10 * LIMIT_S / TICK_S)):
        bench.tick()


async def test_a_row_of_long_steps_is_no_stuck_one(bench: Bench) -> None:
    for number in range(3):
        await bench.begin_step()
        for _ in range(int(0.9 * LIMIT_S / TICK_S)):
            bench.tick()
        bench.runner.may_go.set()
        await bench.observer.until(lambda n=number: len(bench.observer.done) > n)  # type: ignore[misc]
        bench.runner.may_go.clear()


async def test_time_in_which_the_process_was_stopped_is_not_counted(bench: Bench) -> None:
    """Whether it was once for long, or again and again."""
    await bench.begin_step()
    bench.tick()
    bench.tick(100 * LIMIT_S)
    for _ in range(int(10 * LIMIT_S / TICK_S)):
        bench.tick(2 * TICK_S)
    assert bench.ran_until_given_up() > 0.9 * LIMIT_S


async def test_a_thread_that_has_ended_is_found_at_the_next_tick(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.tick()
    monkeypatch.setattr(StepThread, "is_alive", False)
    with pytest.raises(NodeSick, match=r"^engine_dead: the thread"):
        bench.tick()


async def test_a_loop_that_has_ended_is_found_at_once(bench: Bench) -> None:
    """Here, since what hears of its steps raises."""

    def fail(_: object) -> None:
        raise ValueError("a bug")

    bench.observer.step_done = fail  # type: ignore[method-assign, assignment]
    await bench.begin_step()
    bench.runner.may_go.set()
    with pytest.raises(NodeSick, match=r"^engine_dead: its loop ended with ValueError\('a bug'\)"):
        async with asyncio.timeout(30):
            await bench.watch.until(asyncio.Event().wait())


async def test_waiting_ends_with_its_event(bench: Bench) -> None:
    drain = asyncio.Event()
    asyncio.get_running_loop().call_soon(drain.set)
    async with asyncio.timeout(30):
        await bench.watch.until(drain.wait(), asyncio.Event().wait())
