"""When a kept profile is doubted."""

from __future__ import annotations

import pytest

from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.node.reports.step_costs import CONVINCING_STEPS, ProfileWatch
from pdserve.protocol import StepCosts

COSTS = StepCosts(knot_tokens=[1, 64], knot_s=[0.001, 0.002], pair_s=1e-8)
DECODE, PREFILL = StepShape(8, 8), StepShape(64, 1, prefill_pairs=2080)


class Service:
    """Steps of a node whose profile is COSTS."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self._perf = PerfModel(COSTS)
        self._watch = ProfileWatch(self._perf, self.errors.append)

    def step(self, shape: StepShape, factor: float, num_steps: int = 1) -> None:
        """Some steps that take `factor` times what the profile says."""
        for _ in range(num_steps):
            self._perf.observe(shape, factor * PerfModel(COSTS).step_s(shape))
            self._watch.stepped()


@pytest.mark.parametrize("shape", [DECODE, PREFILL])
def test_a_profile_that_steps_keep_beating_is_doubted_once(shape: StepShape) -> None:
    service = Service()
    service.step(shape, 0.5, CONVINCING_STEPS // 2)
    assert not service.errors
    service.step(shape, 0.5, 5 * CONVINCING_STEPS)
    assert service.errors == [pytest.approx(1.0, rel=0.05)]


def test_a_slow_node_says_nothing_about_its_profile() -> None:
    service = Service()
    service.step(DECODE, 3.0, 5 * CONVINCING_STEPS)
    service.step(PREFILL, 0.9, 5 * CONVINCING_STEPS)
    assert not service.errors


def test_a_fast_moment_says_nothing_either() -> None:
    service = Service()
    for _ in range(10):
        service.step(DECODE, 0.5, CONVINCING_STEPS // 2)
        service.step(DECODE, 1.0, CONVINCING_STEPS // 2)
    assert not service.errors
