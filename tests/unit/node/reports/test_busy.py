"""Which share of the time a node computes, however long its steps are."""

from __future__ import annotations

import pytest

from pdserve.engine.interface import StepReport
from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.node.reports.gauges import MEMORY_S, BusyShare
from pdserve.protocol import StepCosts


def step(seconds: float) -> StepReport:
    return StepReport([], [], 0.0, seconds, 0.0, StepShape(1, 1, 0, 10))


def busy_share() -> BusyShare:
    costs = StepCosts(knot_tokens=[1], knot_s=[0.001], sampled_s=0.0, pair_s=1e-6, context_s=0.0)
    return BusyShare(PerfModel(costs), 0.0)


@pytest.mark.parametrize(("step_s", "idle_s"), [(0.01, 0.03), (0.4, 1.2), (3.0, 9.0)])
def test_the_share_is_that_of_the_steps_and_not_of_the_looks(step_s: float, idle_s: float) -> None:
    busy, now_s, seen = busy_share(), 0.0, []
    period_s = step_s + idle_s
    ends = [n * period_s + step_s for n in range(round(120 / period_s))]
    while ends:
        now_s += 0.5
        while ends and ends[0] <= now_s:
            busy.stepped(step(step_s))
            ends.pop(0)
        seen.append(busy.share(now_s))
    settled = seen[60:]
    assert sum(settled) / len(settled) == pytest.approx(0.25, abs=0.03)


def test_an_idle_node_is_soon_known_to_be() -> None:
    busy = busy_share()
    for n in range(1, 101):
        busy.stepped(step(0.5))
        busy.share(0.5 * n)
    assert busy.share(50.0) == pytest.approx(1.0, abs=0.01)
    assert busy.share(50.0 + 3 * MEMORY_S) < 0.06


def test_the_part_for_prompts_is_told_apart() -> None:
    """Every other step is of a prompt; it takes three times as long as a step of decodes."""
    busy, now_s = busy_share(), 0.0
    for _ in range(1000):
        for seconds, shape in ((0.01, StepShape(1, 1, 0, 10)), (0.03, StepShape(9, 0, 45, 0))):
            busy.stepped(StepReport([], [], 0.0, seconds, 0.0, shape))
        now_s += 0.08
        busy.share(now_s)
    assert busy.share(now_s) == pytest.approx(0.5, abs=0.01)
    assert busy.prompts == pytest.approx(0.375, abs=0.01)


def test_two_steps_side_by_side_count_as_the_shares_of_the_cores_that_they_had() -> None:
    """Each runs half of the time, on half of the cores. One of a prompt may look like decodes."""
    busy, now_s, shape = busy_share(), 0.0, StepShape(1, 1, 0, 10)
    for _ in range(1000):
        for of_prompts in (False, True):
            report = StepReport([], [], 0.0, 0.04, 0.0, shape, of_prompts)
            busy.stepped(report, 0.5)
        now_s += 0.08
        busy.share(now_s)
    assert busy.share(now_s) == pytest.approx(0.5, abs=0.01)
    assert busy.prompts == pytest.approx(0.25, abs=0.01)
