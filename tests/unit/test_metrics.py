"""What holds for every metric, and the gauges by which an operator is woken at night."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

import pdserve
from coordinator.nodes.registry import Registry
from coordinator.status import kv_used, watch_nodes
from pdserve.metrics import CoordinatorMetrics, NodeMetrics
from pdserve.protocol import LoadReport, NodeRole, NodeState, Sickness
from tests.fakes.hellos import node_hello
from tests.fakes.outbox import RecordingOutbox

PROCESS = ["process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds"]


def samples(metrics: CoordinatorMetrics) -> dict[str, float]:
    """Every sample without a histogram's label, by its name and labels as they are written."""
    lines = metrics.exposition().decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


@pytest.mark.parametrize("metrics", [CoordinatorMetrics(), NodeMetrics()])
def test_every_metric_has_our_prefix_and_says_what_it_is(
    metrics: CoordinatorMetrics | NodeMetrics,
) -> None:
    families = list(text_string_to_metric_families(metrics.exposition().decode()))
    for family in families:
        assert re.match("pdserve_|process_", family.name), family.name
        assert family.documentation, family.name
    assert set(PROCESS) <= {family.name for family in families}
    (build,) = [f for f in families if f.name == "pdserve_build_info"]
    assert build.samples[0].labels == {"version": pdserve.__version__}


def test_a_sick_node_is_counted_once_by_its_reason() -> None:
    registry, metrics = Registry(), CoordinatorMetrics()
    watch_nodes(registry, metrics)

    def join_and_report(reason: str) -> None:
        hello = node_hello("d", NodeRole.DECODE)
        member = registry.add(hello, RecordingOutbox())  # type: ignore[arg-type]
        for _ in range(2):
            load = LoadReport(state=NodeState.SICK, role=NodeRole.DECODE, reason=reason)
            registry.report(member, load)
        assert not registry.ready(NodeRole.DECODE)

    def count(kind: str) -> float | None:
        return samples(metrics).get(f'pdserve_nodes_sick_total{{reason="{kind}"}}')

    assert [count(kind) for kind in Sickness] == [0] * len(Sickness)
    join_and_report("engine_stuck: a step has not ended for 12 s")
    assert count("engine_stuck") == 1
    join_and_report("engine_stuck: again, after a restart")
    assert count("engine_stuck") == 2
    join_and_report("a newer node's: reason")
    assert count("other") == 1


def test_nodes_are_counted_by_pool_as_long_as_they_are_ready() -> None:
    registry, metrics = Registry(), CoordinatorMetrics()
    watch_nodes(registry, metrics)
    members = [
        registry.add(node_hello(name, role), RecordingOutbox())  # type: ignore[arg-type]
        for name, role in (("p", NodeRole.PREFILL), ("d", NodeRole.DECODE), ("e", NodeRole.DECODE))
    ]

    def counts() -> list[float]:
        seen = samples(metrics)
        names = ['ready_nodes{role="prefill"}', 'ready_nodes{role="decode"}', "attached_nodes"]
        return [seen[f"pdserve_{name}"] for name in names]

    assert counts() == [1, 2, 3]
    registry.report(members[1], LoadReport(state=NodeState.DRAINING, role=NodeRole.DECODE))
    assert counts() == [1, 1, 3]
    registry.remove(members[1])
    registry.remove(members[0])
    assert counts() == [0, 1, 1]


def test_kv_in_use_is_told_of_each_pool_that_has_nodes() -> None:
    registry, metrics = Registry(), CoordinatorMetrics()
    watch_nodes(registry, metrics)
    assert kv_used(registry) == {}
    for name, free in (("d", 1.0), ("e", 0.5)):
        hello = node_hello(name, NodeRole.DECODE)
        member = registry.add(hello, RecordingOutbox())  # type: ignore[arg-type]
        num_free = int(free * hello.num_blocks)
        load = LoadReport(state=NodeState.READY, role=NodeRole.DECODE, free_blocks=num_free)
        registry.report(member, load)
    assert kv_used(registry) == {"decode": 0.25}
    assert samples(metrics)["pdserve_kv_cache_usage_ratio"] == 0.25
