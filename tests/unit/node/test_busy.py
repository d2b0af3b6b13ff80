"""Which share of the time a node computes, however long its steps are."""

from __future__ import annotations

import pytest

from pdserve.engine.interface import StepReport
from pdserve.node.reports.busy import MEMORY_S, BusyShare
from pdserve.perf_model import StepShape


def step(seconds: float) -> StepReport:
    return StepReport([], [], 0.0, seconds, 0.0, StepShape(1))


@pytest.mark.parametrize(("step_s", "idle_s"), [(0.01, 0.03), (0.4, 1.2), (3.0, 9.0)])
def test_the_share_is_that_of_the_steps_and_not_of_the_looks(step_s: float, idle_s: float) -> None:
    busy, now_s, seen = BusyShare(0.0), 0.0, []
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
    busy = BusyShare(0.0)
    for n in range(1, 101):
        busy.stepped(step(0.5))
        busy.share(0.5 * n)
    assert busy.share(50.0) == pytest.approx(1.0, abs=0.01)
    assert busy.share(50.0 + 3 * MEMORY_S) < 0.06
