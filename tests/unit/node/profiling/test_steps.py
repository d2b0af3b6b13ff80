"""Which steps are tried, how they are timed, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.interface import shape_of
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import SampledToken, Scheduled
from pdserve.engine.steps.batches import StepBatches
from pdserve.measured.perf_model import PerfModel, StepRow, StepShape
from pdserve.node.profiling.fit import fit_costs
from pdserve.node.profiling.steps import ALWAYS, StepLimits, steps_to_profile, work
from pdserve.node.profiling.timer import MOST_ROUNDS, StepTimer, core_waits
from pdserve.protocol import StepCosts
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import RequestCancelled
from tests.fakes.runner import FakeRunner
from tests.plain_batch import build_batch
from tests.unit.engine.batches import CPU, assert_same

BLOCK = 16
LIMITS = StepLimits(512, 64, 2048, num_blocks=8192, block_size=BLOCK, vocab_size=320)
COSTS = StepCosts(
    knot_tokens=[1, 64, 512],
    knot_s=[0.001, 0.002, 0.016],
    sampled_s=1e-5,
    pair_s=4e-8,
    context_s=1e-7,
)


def never() -> AbstractContextManager[Callable[[], float]]:
    """Nobody waits for a core."""
    return nullcontext(lambda: 0.0)


class TimedRunner(FakeRunner):
    """Takes as long as a performance model says; the first step of a size takes longer."""

    def __init__(self, factor: float = 1.0, first_s: float = 0.0) -> None:
        super().__init__(BLOCK)
        self.clock = ManualClock()
        self.shapes: list[StepShape] = []
        self._perf = PerfModel(COSTS, factor, factor)
        self._first_s = first_s

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        shape = shape_of(rows)
        if shape.num_tokens not in {seen.num_tokens for seen in self.shapes}:
            self.clock.advance(self._first_s)
        self.clock.advance(self._perf.step_s(shape))
        self.shapes.append(shape)
        return super().execute(rows, progress)

    @property
    def timer(self) -> StepTimer:
        return StepTimer(self, BLOCK, 320, self.clock.now, waits=never)


limits = st.builds(
    StepLimits,
    token_budget=st.integers(1, 9000),
    max_batch_size=st.integers(1, 300),
    max_model_len=st.integers(2, 100_000),
    num_blocks=st.integers(1, 10_000),
    block_size=st.sampled_from([1, 8, 16, 64]),
    vocab_size=st.just(320),
)


@given(limits=limits)
def test_every_step_is_one_the_node_could_run(limits: StepLimits) -> None:
    steps = steps_to_profile(limits)
    assert steps
    assert len(set(steps)) == len(steps) < 200
    for step in steps:
        assert limits.allow(step)
        assert len(step) <= limits.max_batch_size
        assert all(row.num_tokens > 0 <= row.num_before for row in step)
        assert all(row.num_tokens == 1 <= row.num_before for row in step if row.is_decoding)
    first, *others = steps[:1] + steps[ALWAYS:]
    assert all(work(a) <= work(b) for a, b in pairwise([first, *others]))


def test_all_three_kinds_of_steps_are_tried_up_to_the_limits() -> None:
    shapes = [StepShape.of(step) for step in steps_to_profile(LIMITS)]
    assert max(shape.num_tokens for shape in shapes) == 512
    assert max(shape.num_sampled for shape in shapes if shape.is_decode) == 64
    assert any(shape.prefill_pairs and shape.decode_context for shape in shapes)
    assert any(shape.prefill_pairs > 512 * 512 for shape in shapes)


def test_a_step_runs_as_it_was_made_up() -> None:
    runner = TimedRunner()
    step = (
        StepRow(1, 33, is_decoding=True),
        StepRow(20, 16, is_sampled=False),
        StepRow(5, 0),
    )
    seconds = runner.timer.seconds(step)
    assert runner.shapes == [StepShape.of(step)]
    assert seconds == pytest.approx(PerfModel(COSTS).step_s(StepShape.of(step)))


def test_costs_are_found_in_the_time_there_is() -> None:
    runner = TimedRunner(factor=1.3, first_s=0.002)
    costs = fit_costs(runner.timer.sample(steps_to_profile(LIMITS), 3.0))
    assert runner.clock.now() <= 3.0
    shape = StepShape(300, 9, prefill_pairs=50_000, decode_context=3_000)
    assert PerfModel(costs).step_s(shape) == pytest.approx(
        1.3 * PerfModel(COSTS).step_s(shape), rel=0.03
    )


def test_nothing_is_measured_more_often_than_it_helps() -> None:
    runner, steps = TimedRunner(), steps_to_profile(LIMITS)
    runner.timer.sample(steps, 3600.0)
    assert len(runner.shapes) == (1 + MOST_ROUNDS) * len(steps)


def test_a_slow_model_is_known_by_its_small_steps() -> None:
    runner = TimedRunner(factor=300.0)  # the largest step would take ten seconds
    samples = runner.timer.sample(steps_to_profile(LIMITS), 3.0)
    assert runner.clock.now() <= 3.0
    assert 0 < len(samples) < len(steps_to_profile(LIMITS))
    costs = fit_costs(samples)
    assert PerfModel(costs).step_s(StepShape(1, 1)) == pytest.approx(0.3, rel=0.1)


def test_without_any_time_prompts_are_measured_all_the_same() -> None:
    """A token takes ten seconds, as long as reading the weights; from 32 on, work counts."""
    runner = TimedRunner(factor=10_000.0)
    samples = runner.timer.sample(steps_to_profile(LIMITS), 0.1)
    assert [shape.num_tokens for shape, _ in samples] == [1, 32]
    expected_s = 10_000 * PerfModel(COSTS).prefill_s(512, 0, 512)
    found_s = PerfModel(fit_costs(samples)).prefill_s(512, 0, 512)
    assert expected_s / 3 < found_s < expected_s


def test_moments_that_are_bad_do_not_bend_the_costs() -> None:
    runner, pauses = TimedRunner(), iter([0.0, 0.0, 0.05, 0.0, 0.0, 0.0, 0.02] * 1000)

    def now() -> float:
        runner.clock.advance(next(pauses))
        return runner.clock.now()

    timer = StepTimer(runner, BLOCK, 320, now, waits=never)
    costs = fit_costs(timer.sample(steps_to_profile(LIMITS), 30.0))
    assert costs.pair_s == pytest.approx(COSTS.pair_s, rel=0.1)
    assert costs.context_s == pytest.approx(COSTS.context_s, rel=0.1)


def test_a_noisy_minute_is_not_taken_for_what_steps_cost() -> None:
    runner, delays = TimedRunner(), iter([1.0, 1.6, 2.2, 1.9] * 10_000)

    class Noisy(TimedRunner):
        def execute(
            self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
        ) -> list[SampledToken | None]:
            seconds = PerfModel(COSTS).step_s(shape_of(rows))
            runner.clock.advance(seconds * next(delays))
            return FakeRunner.execute(self, rows, progress)

    timer = StepTimer(Noisy(), BLOCK, 320, runner.clock.now, waits=never)
    perf = PerfModel(fit_costs(timer.sample(steps_to_profile(LIMITS), 3600.0)))
    for shape in (StepShape(64, 64, decode_context=6400), StepShape(512, 1, prefill_pairs=131_000)):
        assert perf.step_s(shape) < 1.3 * PerfModel(COSTS).step_s(shape)


def test_rows_have_any_tokens_since_equal_ones_would_share_their_experts() -> None:
    class Reading(TimedRunner):
        def execute(
            self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
        ) -> list[SampledToken | None]:
            for row in rows:
                request = row.request
                tokens = request.prompt_token_ids + request.output_token_ids
                newest.append(tokens[request.num_computed_tokens :])
            return super().execute(rows, progress)

    newest: list[list[int]] = []
    timer = Reading().timer
    timer.seconds((StepRow(1, 100, is_decoding=True),) * 64)
    assert len({token for (token,) in newest}) > 32
    timer.seconds((StepRow(200, 100),))
    assert len(set(newest[-1])) > 100
    assert all(0 <= token < 320 for tokens in newest for token in tokens)


class LayingOut(TimedRunner):
    """Lays its batches out as the engine's runner does."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = StepBatches(BLOCK)

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], list[SampledToken | None]]:
        assert_same(self.batches.lay_out(rows), build_batch(rows, BLOCK, CPU))
        return super().prepare(rows, progress)

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        self.batches.foresee(rows)


@pytest.mark.parametrize("context", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_decode_steps_are_laid_out_in_advance_as_in_service(context: int) -> None:
    runner = LayingOut()
    decode = tuple(StepRow(1, context + i, is_decoding=True) for i in range(3))
    for num_times in (1, 2):
        runner.timer.seconds(decode)
        assert runner.batches.num_foreseen == num_times, "the step that is timed"
        assert runner.shapes[-1] == StepShape.of(decode)
    runner.timer.seconds((StepRow(64, 0),))
    assert (runner.batches.num_foreseen, len(runner.shapes)) == (2, 3)


def test_it_can_be_ended_between_two_steps() -> None:
    runner = TimedRunner()

    def stop() -> None:
        if len(runner.shapes) == 3:
            raise RequestCancelled("the node was stopped")

    timer = StepTimer(runner, BLOCK, 320, runner.clock.now, waits=never, before_each=stop)
    with pytest.raises(RequestCancelled):
        timer.sample(steps_to_profile(LIMITS), 3.0)
    assert len(runner.shapes) == 3


class DeviceRunner(TimedRunner):
    """A device takes as long for a step, and the host needs time before and behind it."""

    GAP_S = 0.01

    def __init__(self, most_ahead: int) -> None:
        super().__init__()
        self.most_ahead = most_ahead
        self.launcher = self
        self.busy_until_s = 0.0

    def prepare(self, rows: Sequence[Scheduled], progress: LayerProgress | None = None) -> Launched:
        self.clock.advance(self.GAP_S)
        return Launched(self, list(rows), shape_of(rows))


class Launched:
    def __init__(self, runner: DeviceRunner, rows: list[Scheduled], shape: StepShape) -> None:
        self.runner, self.rows, self.shape = runner, rows, shape
        self.can_be_followed = len(rows) <= runner.most_ahead

    def __call__(self) -> None:
        self.launch()
        self.result()

    def launch(self) -> None:
        runner = self.runner
        begins_s = max(runner.clock.now(), runner.busy_until_s)
        self.ends_s = runner.busy_until_s = begins_s + PerfModel(COSTS).step_s(self.shape)
        runner.shapes.append(self.shape)

    def result(self) -> None:
        self.runner.clock.advance(max(0.0, self.ends_s - self.runner.clock.now()))

    def prepare_next(self, rows: Sequence[Scheduled]) -> Launched:
        assert self.can_be_followed
        assert [row.request.output_token_ids[-1] for row in rows] == [-1, -2, -3]
        return Launched(self.runner, list(rows), shape_of(rows))


@pytest.mark.parametrize("most_ahead", [0, 3])
def test_steps_of_decodes_on_a_device_follow_each_other(most_ahead: int) -> None:
    """So the host's work counts only where it is waited for."""
    runner = DeviceRunner(most_ahead)
    decodes = tuple(StepRow(1, context, is_decoding=True) for context in (1, 16, 200))
    for step in (decodes, (StepRow(20, 5),)):
        waits_for_host = not most_ahead or step is not decodes
        expected_s = PerfModel(COSTS).step_s(StepShape.of(step))
        expected_s += DeviceRunner.GAP_S * waits_for_host
        assert runner.timer.seconds(step) == pytest.approx(expected_s)
        assert runner.shapes[-1] == StepShape.of(step)


def test_what_others_take_of_the_cores_is_not_counted() -> None:
    runner, step = TimedRunner(), (StepRow(64, 0),)
    waited = iter([0.0, 0.25])
    timer = StepTimer(
        runner, BLOCK, 320, runner.clock.now, waits=lambda: nullcontext(lambda: next(waited))
    )
    runner._first_s = 0.25  # a neighbour has its turn in the middle of the step
    assert timer.seconds(step) == pytest.approx(PerfModel(COSTS).step_s(StepShape.of(step)))


def test_waits_for_a_core_only_grow() -> None:
    with core_waits() as waited_s:
        before = waited_s()
        assert 0.0 <= before <= waited_s()
