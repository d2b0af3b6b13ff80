"""What nodes have said that steps cost, by row."""

from __future__ import annotations

import pytest

from coordinator.routing.fleet import StepTables
from pdserve.protocol import PerfReport, StepCosts
from tests.unit.coordinator.routing.nodes import Nodes


def test_requests_beyond_the_batch_take_turns() -> None:
    nodes = Nodes(d=1)  # ten requests a step, a millisecond each
    assert nodes.router.fleet.decode_one_s(0, 10, 0) == pytest.approx(0.010)
    assert nodes.router.fleet.decode_one_s(0, 25, 0) == pytest.approx(0.025)


def test_equal_costs_share_a_row_that_is_free_again_after_the_last_one() -> None:
    first = PerfReport(
        step=StepCosts(knot_tokens=[1], knot_s=[0.1]), token_budget=8, max_batch_size=4
    )
    second = PerfReport(
        step=StepCosts(knot_tokens=[1], knot_s=[0.2]), token_budget=16, max_batch_size=4
    )
    tables = StepTables()
    assert [tables.take(perf) for perf in (first, first, second)] == [0, 0, 1]
    tables.drop(0)
    assert tables.take(first) == 0
    tables.drop(0)
    tables.drop(0)
    other = PerfReport(
        step=StepCosts(knot_tokens=[1], knot_s=[0.3]), token_budget=2, max_batch_size=4
    )
    assert tables.take(other) == 0
    assert tables.seconds[[0, 1], [2, 16]].tolist() == [0.3, 0.2]
    assert tables.num_tabulated.tolist() == [4, 16]
