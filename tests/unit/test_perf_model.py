"""What a step will take: one formula, a few ratios."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.measured.perf_model import (
    FORGET_S,
    MOST_OFF,
    PerfModel,
    StepRow,
    StepShape,
    chunk_pairs,
)
from pdserve.protocol import StepCosts
from pdserve.shared.clock import ManualClock

COSTS = StepCosts(
    knot_tokens=[1, 100, 200],
    knot_s=[0.010, 0.020, 0.040],
    sampled_s=1e-4,
    pair_s=1e-7,
    context_s=1e-6,
)

shapes = st.builds(
    StepShape,
    num_tokens=st.integers(1, 5000),
    num_sampled=st.integers(0, 500),
    prefill_pairs=st.integers(0, 10**7),
    decode_context=st.integers(0, 10**6),
)


def test_a_step_is_its_tokens_its_samples_and_its_attention() -> None:
    perf = PerfModel(COSTS)
    shape = StepShape(num_tokens=150, num_sampled=10, prefill_pairs=10_000, decode_context=5_000)
    assert perf.step_s(shape) == pytest.approx(0.030 + 0.001 + 0.001 + 0.005)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(1, 0.010), (50, 0.010 + 0.010 * 49 / 99), (100, 0.020), (300, 0.060)]
)
def test_knots_are_met_and_the_last_slope_goes_on(tokens: int, seconds: float) -> None:
    assert PerfModel(COSTS).step_s(StepShape(tokens)) == pytest.approx(seconds)


def test_the_shape_of_rows() -> None:
    rows = [
        StepRow(1, 99, is_decoding=True),
        StepRow(1, 49, is_decoding=True),
        StepRow(4, 10, is_sampled=False),
        StepRow(2, 0),
    ]
    assert StepShape.of(rows) == StepShape(8, 3, (11 + 12 + 13 + 14) + (1 + 2), 150)


@given(num_tokens=st.integers(0, 50), num_before=st.integers(0, 50))
def test_each_query_sees_what_is_before_it_and_itself(num_tokens: int, num_before: int) -> None:
    seen = sum(num_before + position + 1 for position in range(num_tokens))
    assert chunk_pairs(num_tokens, num_before) == seen


@given(batch=st.integers(1, 400), context=st.integers(1, 4000))
def test_decoding_is_a_step_like_others(batch: int, context: int) -> None:
    perf = PerfModel(COSTS, decode_ratio=1.5)
    rows = [StepRow(1, context - 1, is_decoding=True)] * batch
    assert perf.decode_s(batch, batch * context) == pytest.approx(perf.step_s(StepShape.of(rows)))


@given(uncached=st.integers(1, 1500), cached=st.integers(0, 800), budget=st.integers(1, 600))
def test_a_prompt_is_the_sum_of_its_chunks(uncached: int, cached: int, budget: int) -> None:
    perf, seconds, end = PerfModel(COSTS, prefill_ratio=0.8), 0.0, cached + uncached
    for start in range(cached, end, budget):
        length = min(budget, end - start)
        row = StepRow(length, start, is_sampled=start + length == end)
        seconds += perf.step_s(StepShape.of([row]))
    assert perf.prefill_s(uncached, cached, budget) == pytest.approx(seconds)


def test_nothing_to_compute_takes_no_time() -> None:
    assert PerfModel(COSTS).prefill_s(0, 100, 64) == 0


@given(shape=shapes, more=shapes)
def test_a_larger_step_is_never_faster(shape: StepShape, more: StepShape) -> None:
    larger = StepShape(
        shape.num_tokens + more.num_tokens,
        shape.num_sampled + more.num_sampled,
        shape.prefill_pairs + more.prefill_pairs,
        shape.decode_context + more.decode_context,
    )
    perf = PerfModel(COSTS)
    assert 0 < perf.step_s(shape) <= perf.step_s(larger)


def test_ratios_are_told_apart() -> None:
    perf = PerfModel(COSTS)
    decode = StepShape(8, 8, decode_context=800)
    mixed = StepShape(64, 8, prefill_pairs=2000, decode_context=800)
    as_profiled = perf.step_s(decode), perf.step_s(mixed)
    for _ in range(200):
        perf.observe(decode, 1.5 * as_profiled[0])
        perf.observe(mixed, 0.7 * as_profiled[1])
    assert perf.decode_ratio == pytest.approx(1.5, rel=0.01)
    assert perf.prefill_ratio == pytest.approx(0.7, rel=0.01)
    assert perf.step_s(decode) == pytest.approx(1.5 * as_profiled[0], rel=0.01)
    assert perf.decode_error < 0.02
    assert perf.prefill_error < 0.02


def test_that_steps_were_far_slower_is_forgotten_when_there_are_none() -> None:
    perf = PerfModel(COSTS)
    decode, mixed = StepShape(8, 8), StepShape(64, 8, prefill_pairs=2000)
    assert perf.known_ratios(0.0) == (0.0, 0.0)
    for _ in range(40):
        perf.observe(decode, 5 * PerfModel(COSTS).step_s(decode), now_s=1.0)
        perf.observe(mixed, 1.5 * PerfModel(COSTS).step_s(mixed), now_s=1.0)
    as_seen = perf.prefill_ratio, perf.decode_ratio
    assert perf.known_ratios(FORGET_S) == as_seen
    assert perf.known_ratios(FORGET_S + 2.0) == (perf.prefill_ratio, 0.0)  # which is not avoided
    perf.observe(decode, 5 * PerfModel(COSTS).step_s(decode), now_s=FORGET_S + 2.0)
    assert perf.known_ratios(FORGET_S + 3.0)[1] == pytest.approx(5.0, rel=0.01)  # at once


def test_a_process_that_stood_still_for_a_moment_is_hardly_remembered() -> None:
    perf, shape = PerfModel(COSTS), StepShape(8, 8)
    for _ in range(100):
        perf.observe(shape, 0.011)
    before = perf.decode_ratio
    perf.observe(shape, 3600.0)
    assert before < perf.decode_ratio <= before * (1 + 0.05 * (MOST_OFF - 1)) * 1.0001


def test_a_profile_of_another_machine_is_soon_corrected() -> None:
    perf, shape = PerfModel(COSTS), StepShape(8, 8)
    for _ in range(40):
        perf.observe(shape, 100 * PerfModel(COSTS).step_s(shape))
    assert perf.decode_ratio > 10
    for _ in range(100):
        perf.observe(shape, 100 * PerfModel(COSTS).step_s(shape))
    assert perf.decode_ratio == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize("shape", [StepShape(8, 8), StepShape(512, 1, prefill_pairs=131_000)])
@pytest.mark.parametrize("factor", [0.4, 0.5, 0.7, 1.4, 2.0, 3.0])
def test_a_profile_from_a_noisy_minute_is_corrected_within_a_few_steps(
    shape: StepShape, factor: float
) -> None:
    clock, perf = ManualClock(), PerfModel(COSTS)
    as_profiled = perf.step_s(shape)
    for _ in range(100):  # as long as the noise lasts
        perf.observe(shape, as_profiled)
    is_seen_s = factor * as_profiled
    while not 0.9 < perf.step_s(shape) / is_seen_s < 1.1:
        clock.advance(is_seen_s)
        perf.observe(shape, is_seen_s)
    assert clock.now() <= 20 * is_seen_s


def test_bursts_of_a_neighbour_do_not_make_the_prediction_jump() -> None:
    perf, shape = PerfModel(COSTS), StepShape(8, 8)
    as_profiled = perf.step_s(shape)
    for _ in range(50):
        perf.observe(shape, as_profiled)
    for step in range(400):  # a quarter of the steps take half as long again
        perf.observe(shape, as_profiled * (1.5 if step % 16 < 4 else 1.0))
        assert 0.99 < perf.decode_ratio < 1.25


@given(seen=st.lists(st.tuples(shapes, st.floats(0, 1e6)), max_size=50))
def test_ratios_stay_above_nothing(seen: list[tuple[StepShape, float]]) -> None:
    perf = PerfModel(COSTS)
    for shape, seconds in seen:
        perf.observe(shape, seconds)
    assert 0 < perf.prefill_ratio < float("inf")
    assert 0 < perf.decode_ratio < float("inf")


def test_new_costs_count_at_once() -> None:
    perf = PerfModel(COSTS)
    perf.costs = replace(COSTS, knot_s=[0.1, 0.2, 0.4])
    assert perf.step_s(StepShape(100)) == pytest.approx(0.2)


def test_throughput_saturates_where_arithmetic_takes_over() -> None:
    flat = StepCosts(
        knot_tokens=[1, 256, 1024], knot_s=[0.01, 0.01, 0.04]
    )  # 256 for the price of 1
    assert PerfModel(flat).saturating_tokens(1024) == pytest.approx(0.95 * 256, abs=5)
    linear = StepCosts(knot_tokens=[1, 1000], knot_s=[1e-6, 1e-3])
    assert PerfModel(linear).saturating_tokens(512) <= 2


def test_attention_makes_long_prompts_less_worthwhile() -> None:
    costs = StepCosts(knot_tokens=[1, 64, 4096], knot_s=[0.01, 0.01, 0.64], pair_s=1e-6)
    assert PerfModel(costs).saturating_tokens(4096) < 200


@given(
    seconds=st.lists(st.floats(0.0, 0.1), min_size=1, max_size=60),
    requests=st.integers(1, 300),
    context=st.integers(1, 10**6),
)
def test_many_decodes_are_as_one_after_the_other(
    seconds: list[float], requests: int, context: int
) -> None:
    """To the last bit: simulations step over what does not change."""
    at_once, singly = PerfModel(COSTS), PerfModel(COSTS)
    first = StepShape(requests, requests, 0, context)
    shapes = [
        replace_context(first, context + number * requests) for number in range(len(seconds) + 1)
    ]
    assert singly.decode_steps_s(first, 3) == [
        singly.step_s(replace_context(first, context + number * requests)) for number in range(3)
    ]
    predicted_s = []
    for shape, after, step_s in zip(shapes, shapes[1:], seconds, strict=False):
        singly.observe(shape, step_s, 5.0)
        predicted_s.append(singly.decode_s(requests, after.decode_context))
    assert at_once.observe_decodes(first, seconds, 5.0) == predicted_s
    for later_s in (5.0, 100.0):
        assert at_once.known_ratios(later_s) == singly.known_ratios(later_s)
    assert at_once.decode_error == singly.decode_error
    assert at_once._is_tried == singly._is_tried


def replace_context(shape: StepShape, context: int) -> StepShape:
    return StepShape(shape.num_tokens, shape.num_sampled, 0, context)
