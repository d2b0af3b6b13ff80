"""`--slo-classes auto`: what nodes have measured becomes promises."""

from __future__ import annotations

import logging
import shlex

import msgspec
import pytest

from coordinator.admission.measured_promises import MULTIPLES, MeasuredPromises
from coordinator.nodes.registry import Registry
from pdserve.protocol import NodeRole, NodeState, PerfReport, StepCosts
from pdserve.shared.slo import AUTO, DEFAULT_CLASS, parse_slo_classes
from tests.fakes.members import join, report

P, D = NodeRole.PREFILL, NodeRole.DECODE
# 1 ms a token: a prompt of 1024 takes 1.024 s in steps of 512, 16 streams take 16 ms.
PERF = PerfReport(
    step=StepCosts(knot_tokens=[1, 1000], knot_s=[0.001, 1.0]), token_budget=512, max_batch_size=64
)
SLOWER = msgspec.structs.replace(PERF, step=StepCosts(knot_tokens=[1, 1000], knot_s=[0.002, 2.0]))


class Bench:
    def __init__(self) -> None:
        self.registry = Registry()
        self.classes = parse_slo_classes([AUTO], DEFAULT_CLASS)
        MeasuredPromises(self.registry, self.classes)

    def promised(self, name: str) -> tuple[float, float]:
        cls = self.classes.by_name[name]
        return cls.ttft_s, cls.tpot_s


def test_nothing_is_promised_before_a_node_has_measured() -> None:
    bench = Bench()
    member = join(bench.registry, "p", P)
    assert bench.promised("interactive") == (0.0, 0.0)
    bench.registry.profiled(member, PERF)
    assert bench.promised("interactive") == (5.1, 0.032)
    assert bench.promised("standard") == (26.0, 0.08)
    assert bench.promised("batch") == (0.0, 0.0)
    assert bench.classes.default.ttft_s == 26.0
    assert bench.classes.highest.ttft_s == 5.1


def test_a_node_that_still_loads_promises_nothing() -> None:
    bench = Bench()
    member = join(bench.registry, "p", P, state=NodeState.LOADING)
    bench.registry.profiled(member, PERF)
    assert bench.promised("interactive") == (0.0, 0.0)
    report(bench.registry, member, P)
    assert bench.promised("interactive") == (5.1, 0.032)


def test_each_pool_promises_what_it_does_and_its_slowest_node_decides() -> None:
    bench = Bench()
    bench.registry.profiled(join(bench.registry, "p0", P), PERF)
    slow = join(bench.registry, "d0", D)
    bench.registry.profiled(slow, SLOWER)
    assert bench.promised("interactive") == (5.1, 0.064)
    bench.registry.profiled(join(bench.registry, "d1", D), PERF)
    assert bench.promised("interactive") == (5.1, 0.064)
    report(bench.registry, slow, P)
    assert bench.promised("interactive") == (10.0, 0.032), "it is a prefill node now"
    bench.registry.remove(slow)
    assert bench.promised("interactive") == (5.1, 0.032)


def test_promises_outlive_the_last_node() -> None:
    bench = Bench()
    member = join(bench.registry, "d", D)
    bench.registry.profiled(member, PERF)
    bench.registry.remove(member)
    assert bench.promised("interactive") == (5.1, 0.032)


def test_they_are_told_once_as_they_can_be_set(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.INFO, "coordinator.admission.measured_promises"):
        for name in ("p0", "p1", "p2"):
            bench.registry.profiled(join(bench.registry, name, P), PERF)
    (record,) = [r for r in caplog.records if r.name == "coordinator.admission.measured_promises"]
    (setting,) = shlex.split(record.message.partition("--slo-classes ")[2])
    assert parse_slo_classes(setting.split(","), DEFAULT_CLASS) == bench.classes
    assert [name for name, cls in bench.classes.by_name.items() if cls.ttft_s] == list(MULTIPLES)
