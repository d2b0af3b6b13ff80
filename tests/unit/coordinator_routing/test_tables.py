"""The formulas for many nodes give what the performance model gives for each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.routing.tables import StepTables
from pdserve.perf_model import PerfModel
from pdserve.protocol import NodeRole, PerfReport, StepCosts
from tests.unit.coordinator_routing.nodes import Nodes

SECONDS = st.floats(0.0001, 0.1)


@st.composite
def perf_reports(draw: st.DrawFn) -> PerfReport:
    knots = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True))
    steps = draw(st.lists(SECONDS, min_size=len(knots), max_size=len(knots)))
    costs = StepCosts(
        knot_tokens=sorted(knots),
        knot_s=sorted(steps),
        sampled_s=draw(st.floats(0, 0.001)),
        pair_s=draw(st.floats(0, 1e-6)),
        context_s=draw(st.floats(0, 1e-6)),
    )
    return PerfReport(
        step=costs,
        token_budget=draw(st.integers(1, 256)),
        max_batch_size=draw(st.integers(1, 64)),
    )


@given(
    reports=st.lists(perf_reports(), min_size=1, max_size=4),
    ratio=st.floats(0.5, 2),
    uncached=st.integers(1, 2000),
    cached=st.integers(0, 2000),
    requests=st.integers(1, 200),
    context=st.integers(0, 100_000),
)
def test_predictions_equal_the_performance_models(
    reports: list[PerfReport], ratio: float, uncached: int, cached: int, requests: int, context: int
) -> None:
    nodes = Nodes()
    for number, perf in enumerate(reports):
        member = nodes.join(f"n{number}", NodeRole.PREFILL, perf)
        nodes.report(member, prefill_ratio=ratio, decode_ratio=1 / ratio)
    fleet = nodes.router.fleet
    prompt_s = fleet.prompt_s(uncached, cached)
    slots = np.arange(len(reports))
    each_s = fleet.prefill_s(slots, np.full(len(slots), uncached), np.full(len(slots), cached))
    decode_s = fleet.decode_s(slots, np.full(len(slots), requests), np.full(len(slots), context))
    for slot, perf in enumerate(reports):
        model = PerfModel(perf.step, ratio, 1 / ratio)
        expected_s = model.prefill_s(uncached, cached, perf.token_budget)
        assert prompt_s[slot] == pytest.approx(expected_s)
        assert each_s[slot] == pytest.approx(expected_s)
        if requests <= perf.max_batch_size:
            expected_s = model.decode_s(requests, context)
            assert decode_s[slot] == pytest.approx(expected_s)
        assert fleet.decode_one_s(slot, requests, context) == pytest.approx(decode_s[slot])


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
    assert tables.steps_s(np.array([0, 1]), np.array([2, 16])).tolist() == [0.3, 0.2]
