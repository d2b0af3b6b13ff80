"""What is learned of the cost of pulling KV, compared with computing it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.measured.perf_model import PerfModel
from pdserve.node.prefixes.cost import (
    PULL_BYTES_PER_S,
    PULL_FIXED_S,
    CostLine,
    Forecast,
    PrefixWorth,
    PullCosts,
    is_worth_pulling,
)
from pdserve.protocol import StepCosts
from pdserve.shared.clock import ManualClock
from tests.unit.node.prefixes.prefix_nodes import make_layout


def made_costs() -> PullCosts:
    return PullCosts(PerfModel(), token_budget=100)


def test_before_anything_was_done_the_guess_counts() -> None:
    costs = made_costs()
    forecast = costs.forecast("tcp", 10**8, 1024)
    assert forecast.pull_s == pytest.approx(PULL_FIXED_S + 10**8 / PULL_BYTES_PER_S)
    assert costs.transfers() == []


def test_computing_is_what_the_performance_model_says() -> None:
    costs = made_costs()
    costs.perf.costs = StepCosts(knot_tokens=[1, 100], knot_s=[0.01, 1.0])
    assert costs.forecast("tcp", 0, 250).compute_s == pytest.approx(1.0 + 1.0 + 0.5)
    costs.perf.prefill_ratio = 3.0
    assert costs.forecast("tcp", 0, 250).compute_s == pytest.approx(7.5)


def test_what_was_seen_outweighs_the_guess() -> None:
    costs = made_costs()
    for i in range(60):
        costs.observe_pull("shm", 2**20 * (i % 7), 0.001 + 2**20 * (i % 7) / 8e9)
    forecast = costs.forecast("shm", 32 << 20, 400)
    assert forecast.pull_s == pytest.approx(0.001 + (32 << 20) / 8e9, rel=0.1)
    [told] = costs.transfers()
    assert told.transport == "shm"
    assert told.fixed_s == pytest.approx(0.001, rel=0.1)
    assert told.bytes_per_s == pytest.approx(8e9, rel=0.1)


def test_transports_are_told_apart() -> None:
    costs = made_costs()
    for _ in range(20):
        costs.observe_pull("tcp", 1 << 20, 1.0)
    assert costs.forecast("tcp", 1 << 20, 1).pull_s == pytest.approx(1.0, rel=0.1)
    assert costs.forecast("shm", 1 << 20, 1).pull_s < 0.1


def test_a_machine_that_changes_is_followed() -> None:
    line = CostLine(0.0, 1.0, 10.0)
    for _ in range(100):
        line.observe(10.0, 1.0)
    for _ in range(100):
        line.observe(10.0, 5.0)
    assert line.predict(10.0) == pytest.approx(5.0, rel=0.05)


def test_a_pull_that_was_given_up_is_a_lower_bound() -> None:
    costs = made_costs()
    before = costs.forecast("tcp", 1 << 20, 1)
    costs.observe_at_least("tcp", 1 << 20, before.pull_s / 2)  # it might have been over in time
    assert costs.forecast("tcp", 1 << 20, 1) == before
    costs.observe_at_least("tcp", 1 << 20, 1.0)
    assert costs.forecast("tcp", 1 << 20, 1).pull_s == pytest.approx(1.0, rel=0.1)


def test_slow_pulls_have_longer_deadlines_as_far_as_sources_wait_for_them() -> None:
    costs, layout = made_costs(), make_layout()
    costs.perf.costs = StepCosts(knot_tokens=[1], knot_s=[100.0])
    worth = PrefixWorth(costs, layout, ManualClock(), "auto", longest_s=30.0)
    assert costs.deadline_s("tcp", layout.block_bytes, 5.0) == 5.0
    assert worth.patience_s(["tcp", ""], 1, 2.0) == 2.0
    for _ in range(60):
        costs.observe_pull("tcp", layout.block_bytes, 8.0)
    assert costs.deadline_s("tcp", layout.block_bytes, 5.0) == pytest.approx(16, rel=0.1)
    assert worth.patience_s(["tcp", ""], 1, 2.0) == pytest.approx(16, rel=0.1)
    assert worth.patience_s([""], 1, 2.0) == 2.0
    assert worth.pays("tcp", 1)
    for _ in range(60):
        costs.observe_pull("tcp", layout.block_bytes, 40.0)
    assert worth.deadline_s("tcp", 1, 2.0) == 30.0
    assert not worth.pays("tcp", 1)  # though computing takes longer
    costs.perf.costs = StepCosts(knot_tokens=[1], knot_s=[3.0])
    assert worth.patience_s(["tcp"], 1, 2.0) == 6.0


def test_a_transport_that_is_declined_long_enough_is_tried_again() -> None:
    costs = made_costs()
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
    line = CostLine(0.005, 1e-9, 1e8)
    for seen_amount, seconds in seen:
        line.observe(seen_amount, seconds)
    assert 0 <= line.predict(0) <= line.predict(amount)


def test_the_policy_is_whichever_is_sooner() -> None:
    assert is_worth_pulling(Forecast(pull_s=1.0, compute_s=2.0))
    assert not is_worth_pulling(Forecast(pull_s=2.0, compute_s=1.0))


def test_listeners_hear_of_what_was_learned_and_of_nothing_else() -> None:
    costs, heard = made_costs(), []
    costs.on_pull(lambda *_: heard.append(costs.transfers()))
    costs.declined("tcp")
    costs.observe_at_least("tcp", 1 << 20, 0.0)
    assert not heard
    costs.observe_pull("tcp", 1 << 20, 0.001)
    assert [told.transport for [told] in heard] == ["tcp"]


def test_a_line_that_does_not_rise_has_a_rate_all_the_same() -> None:
    costs = made_costs()
    for size in (0, 1 << 30) * 200:
        costs.observe_pull("shm", size, 0.001)
    [told] = costs.transfers()
    assert 0 < told.bytes_per_s < float("inf")
