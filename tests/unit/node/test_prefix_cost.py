"""Learning what pulling and computing cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.node.cost import (
    PULL_BYTES_PER_S,
    PULL_FIXED_S,
    STEP_FIXED_S,
    STEP_TOKENS_PER_S,
    Costs,
    Forecast,
    Line,
    is_worth_pulling,
)


def test_before_anything_was_done_the_guess_counts() -> None:
    forecast = Costs(token_budget=512).forecast("tcp", 10**8, 1024)
    assert forecast.pull_s == pytest.approx(PULL_FIXED_S + 10**8 / PULL_BYTES_PER_S)
    assert forecast.compute_s == pytest.approx(2 * STEP_FIXED_S + 1024 / STEP_TOKENS_PER_S)


def test_what_was_seen_outweighs_the_guess() -> None:
    costs = Costs(token_budget=100)
    for i in range(60):
        costs.observe_pull("shm", 2**20 * (i % 7), 0.001 + 2**20 * (i % 7) / 8e9)
        costs.observe_step(10 * (i % 7), 0.02 + 10 * (i % 7) / 50_000)
    forecast = costs.forecast("shm", 32 << 20, 400)
    assert forecast.pull_s == pytest.approx(0.001 + (32 << 20) / 8e9, rel=0.1)
    assert forecast.compute_s == pytest.approx(4 * 0.02 + 400 / 50_000, rel=0.1)


def test_transports_are_told_apart() -> None:
    costs = Costs(token_budget=100)
    for _ in range(20):
        costs.observe_pull("tcp", 1 << 20, 1.0)
    assert costs.forecast("tcp", 1 << 20, 1).pull_s == pytest.approx(1.0, rel=0.1)
    assert costs.forecast("shm", 1 << 20, 1).pull_s < 0.1


def test_a_machine_that_changes_is_followed() -> None:
    line = Line(0.0, 1.0, 10.0)
    for _ in range(100):
        line.observe(10.0, 1.0)
    for _ in range(100):
        line.observe(10.0, 5.0)
    assert line.predict(10.0) == pytest.approx(5.0, rel=0.05)


def test_a_pull_that_was_given_up_is_a_lower_bound() -> None:
    costs = Costs(token_budget=100)
    before = costs.forecast("tcp", 1 << 20, 1)
    costs.observe_at_least("tcp", 1 << 20, before.pull_s / 2)  # it might have been over in time
    assert costs.forecast("tcp", 1 << 20, 1) == before
    costs.observe_at_least("tcp", 1 << 20, 1.0)
    assert costs.forecast("tcp", 1 << 20, 1).pull_s == pytest.approx(1.0, rel=0.1)


def test_a_transport_that_is_declined_long_enough_is_tried_again() -> None:
    costs = Costs(token_budget=100)
    guess = costs.forecast("tcp", 1 << 20, 1).pull_s
    for _ in range(60):
        costs.observe_pull("tcp", 1 << 20, 1.0)
    costs.declined("tcp")
    assert costs.forecast("tcp", 1 << 20, 1).pull_s == pytest.approx(1.0, rel=0.1)
    for _ in range(300):
        costs.declined("tcp")
    assert costs.forecast("tcp", 1 << 20, 1).pull_s == pytest.approx(guess, rel=0.1)


@given(
    seen=st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e4)), max_size=30),
    amount=st.floats(0, 1e12),
)
def test_a_forecast_is_never_negative(seen: list[tuple[float, float]], amount: float) -> None:
    line = Line(0.005, 1e-9, 1e8)
    for seen_amount, seconds in seen:
        line.observe(seen_amount, seconds)
    assert 0 <= line.predict(0) <= line.predict(amount)


def test_the_policy_is_whichever_is_sooner() -> None:
    assert is_worth_pulling(Forecast(pull_s=1.0, compute_s=2.0))
    assert not is_worth_pulling(Forecast(pull_s=2.0, compute_s=1.0))
