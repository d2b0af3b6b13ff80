"""From measured steps to costs."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.measured.perf_model import PerfModel, StepRow, StepShape
from pdserve.node.profiling.fit import (
    Sample,
    fit_costs,
    non_negative_least_squares,
    token_ladder,
)
from pdserve.node.profiling.steps import StepLimits, steps_to_profile
from pdserve.protocol import StepCosts

LIMITS = StepLimits(512, 64, 2048, num_blocks=8192, block_size=16, vocab_size=320)
TRUE = StepCosts(
    knot_tokens=[1, 32, 64, 512],
    knot_s=[0.0015, 0.0020, 0.0030, 0.0140],
    sampled_s=1e-5,
    pair_s=4e-8,
    context_s=1e-7,
)


def measured(costs: StepCosts, noise: float = 0.0, outliers: float = 0.0) -> list[Sample]:
    perf, rng = PerfModel(costs), random.Random(1)
    samples = []
    for step in steps_to_profile(LIMITS):
        shape = StepShape.of(step)
        paused = 4.0 if rng.random() < outliers else 1.0
        samples.append((shape, paused * rng.gauss(1, noise) * perf.step_s(shape)))
    return samples


def held_out(count: int) -> list[StepShape]:
    rng = random.Random(2)
    found = []
    for _ in range(count):
        chunk = StepRow(rng.randint(1, 448), rng.randint(0, 1500))
        decodes = [StepRow(1, rng.randint(1, 1000), is_decoding=True)] * rng.randint(0, 64)
        found.append(StepShape.of([chunk] if rng.random() < 0.5 else [chunk, *decodes]))
    return found


@pytest.mark.parametrize(
    ("noise", "outliers", "most"), [(0.0, 0.0, 0.01), (0.03, 0.0, 0.04), (0.03, 0.1, 0.05)]
)
def test_known_costs_are_recovered(noise: float, outliers: float, most: float) -> None:
    true, fitted = PerfModel(TRUE), PerfModel(fit_costs(measured(TRUE, noise, outliers)))
    errors = [abs(fitted.step_s(shape) / true.step_s(shape) - 1) for shape in held_out(200)]
    assert sum(errors) / len(errors) < most


def test_each_cost_finds_its_own_term() -> None:
    fitted = fit_costs(measured(TRUE))
    assert fitted.sampled_s == pytest.approx(TRUE.sampled_s, rel=0.02)
    assert fitted.pair_s == pytest.approx(TRUE.pair_s, rel=0.02)
    assert fitted.context_s == pytest.approx(TRUE.context_s, rel=0.02)


@given(
    samples=st.lists(
        st.tuples(
            st.builds(
                StepShape,
                num_tokens=st.integers(1, 600),
                num_sampled=st.integers(0, 64),
                prefill_pairs=st.integers(0, 10**6),
                decode_context=st.integers(0, 10**5),
            ),
            st.floats(1e-5, 10.0),
        ),
        min_size=1,
        max_size=25,
    )
)
def test_whatever_was_measured_no_cost_is_negative_and_knots_ascend(samples: list[Sample]) -> None:
    costs = fit_costs(samples)
    numbers = [*costs.knot_s, costs.sampled_s, costs.pair_s, costs.context_s]
    assert all(0 <= number < float("inf") for number in numbers)
    assert all(a < b for a, b in pairwise(costs.knot_tokens))
    assert all(a <= b for a, b in pairwise(costs.knot_s))
    assert PerfModel(costs).step_s(samples[0][0]) >= 0


def test_one_sample_is_enough_to_say_something() -> None:
    costs = fit_costs([(StepShape(7, 1, prefill_pairs=28), 0.002)])
    assert PerfModel(costs).step_s(StepShape(7, 1, prefill_pairs=28)) == pytest.approx(0.002)


def test_knots_are_only_where_something_was_measured() -> None:
    samples = [(StepShape(tokens, 1), tokens / 1000) for tokens in (1, 5, 100)]
    assert fit_costs(samples).knot_tokens == [1, 5, 100]


@given(most=st.integers(1, 100_000))
def test_the_ladder_ends_where_it_must_and_has_no_wide_gaps(most: int) -> None:
    ladder = token_ladder(most)
    assert ladder[0] == 1
    assert ladder[-1] == most
    assert all(a < b <= 2 * a for a, b in pairwise(ladder))


@given(data=st.data())
def test_the_least_squares_are_the_least(data: st.DataObject) -> None:
    """No step along any coordinate makes it better (Karush, Kuhn and Tucker)."""
    numbers = st.floats(-10, 10).map(lambda number: round(number, 2))
    rows = data.draw(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=3, max_size=8))
    a = np.array(rows)
    b = np.array(data.draw(st.lists(numbers, min_size=len(rows), max_size=len(rows))))
    x = non_negative_least_squares(a, b)
    assert (x >= 0).all()
    gradient = a.T @ (b - a @ x)
    scale = 1e-6 * (1 + np.abs(a).max()) * (1 + np.abs(b).max())
    assert (gradient <= scale).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) <= scale
