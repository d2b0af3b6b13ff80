"""What a coordinator notes for those who look after the cluster: absent nodes, clocks, calls."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coordinator.api.observer import RequestSummary
from coordinator.nodes.absent import KEPT_S, MOST, MOST_REASON, Absent
from coordinator.nodes.registry import ClockOffset, Registry
from coordinator.observers.endings import CallWatch
from pdserve.protocol import NodeRole, NodeState
from pdserve.protocol.status import RecentCalls
from pdserve.shared.clock import ManualClock
from tests.fakes.members import join, report

SUMMARY = RequestSummary(
    request_id="r",
    endpoint="/v1/completions",
    slo=None,
    is_streaming=False,
    status=200,
    error_code=None,
    finish_reason="length",
    num_prompt_tokens=1,
    num_cached_tokens=0,
    num_completion_tokens=1,
    e2e_s=0.1,
    ttft_s=0.1,
    tpot_s=None,
)


class Cluster:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = Registry()
        self.absent = Absent(self.registry, self.clock.now)

    def told(self) -> list[tuple[str, str, float]]:
        return [(node.absence, node.node_id, node.since_s) for node in self.absent.nodes()]


def test_a_lost_node_is_missed_until_it_is_back() -> None:
    cluster = Cluster()
    member = join(cluster.registry, "d0", NodeRole.DECODE)
    assert cluster.told() == []
    cluster.registry.remove(member)
    cluster.clock.advance(5)
    assert cluster.told() == [("lost", "d0", 5)]
    assert [role for role in NodeRole if cluster.absent.misses(role)] == [NodeRole.DECODE]
    join(cluster.registry, "d0", NodeRole.DECODE)
    assert cluster.told() == []
    assert not cluster.absent.misses(NodeRole.DECODE)


@pytest.mark.parametrize(("state", "model"), [(NodeState.READY, "m"), (NodeState.LOADING, "")])
def test_of_a_lost_node_it_tells_as_which_model_it_was_ready(state: NodeState, model: str) -> None:
    """Whoever starts it again does not begin with a model that may have ended it."""
    cluster = Cluster()
    member = join(cluster.registry, "d0", NodeRole.DECODE, model_name="m")
    report(cluster.registry, member, NodeRole.DECODE, state=state)
    cluster.registry.remove(member)
    assert [node.model for node in cluster.absent.nodes()] == [model]
    cluster.absent.forget("d0")
    assert cluster.told() == []
    assert not cluster.absent.misses(NodeRole.DECODE)


def test_a_node_that_was_sick_is_missed_with_its_reason() -> None:
    cluster = Cluster()
    member = join(cluster.registry, "d0", NodeRole.DECODE)
    cluster.registry.report(
        member, replace(member.load, state=NodeState.SICK, reason="rank_lost: rank 1 has ended")
    )
    cluster.registry.remove(member)
    assert [node.reason for node in cluster.absent.nodes()] == ["rank_lost: rank 1 has ended"]


def test_a_drained_node_is_not_missed() -> None:
    cluster = Cluster()
    member = join(cluster.registry, "d0", NodeRole.DECODE)
    cluster.registry.report(member, replace(member.load, state=NodeState.DRAINING))
    cluster.registry.remove(member)
    assert cluster.told() == []


def test_a_refused_node_is_told_as_long_as_it_tries() -> None:
    cluster = Cluster()
    cluster.registry.refused("p9", "x" * 10_000)
    assert [len(node.reason) for node in cluster.absent.nodes()] == [MOST_REASON]
    cluster.clock.advance(KEPT_S["refused"] - 1)
    cluster.registry.refused("p9", "another model")
    cluster.clock.advance(2)
    assert cluster.told() == [("refused", "p9", 2)]
    join(cluster.registry, "p9", NodeRole.PREFILL)
    assert cluster.told() == []
    cluster.registry.refused("p8", "another model")
    cluster.clock.advance(KEPT_S["refused"])
    assert cluster.told() == []


def test_only_so_many_are_remembered() -> None:
    cluster = Cluster()
    for i in range(MOST + 1):
        cluster.registry.refused(f"p{i}", "another model")
    assert [node.node_id for node in cluster.absent.nodes()] == [
        f"p{i}" for i in range(1, MOST + 1)
    ]


def test_a_clock_is_measured_by_the_fastest_of_the_last_reports() -> None:
    clock = ManualClock(1000.0)
    offset = ClockOffset(clock.now)
    offset.heard(0.0)
    assert offset.ms is None
    for delay_s in (0.5, 0.002, 0.1):
        clock.advance(1)
        offset.heard(clock.now() + 3.0 - delay_s)
    assert offset.ms == pytest.approx(2998)
    for _ in range(20):  # it was set right
        offset.heard(clock.now())
    assert offset.ms == 0


def test_the_calls_of_the_last_minute_are_counted_by_how_they_ended() -> None:
    clock = ManualClock()
    watch = CallWatch(clock.now)
    watch.call_ended(replace(SUMMARY, status=503, error_code="no_node_available"))
    clock.advance(1)
    watch.begin()
    watch.call_ended(replace(SUMMARY, status=503, error_code="no_node_available", duration_s=0.5))
    assert watch.recent().calls == 0, "they were sent before there was a node"
    for status, code in (
        (200, None),
        (429, "rate_limit_exceeded"),
        (400, "invalid_request"),
        (503, "node_lost"),
        (499, "client_disconnected"),
        (503, "node_lost"),
    ):
        watch.call_ended(_summary(status, code))
    told = RecentCalls(calls=6, refused={"rate_limit_exceeded": 1}, failed={"node_lost": 2})
    assert watch.recent() == told
    clock.advance(30)
    watch.call_ended(_summary(503, "node_lost"))
    assert watch.recent() == RecentCalls(
        calls=7, refused={"rate_limit_exceeded": 1}, failed={"node_lost": 3}
    )
    clock.advance(30)
    assert watch.recent() == RecentCalls(calls=1, failed={"node_lost": 1})
    clock.advance(3600)
    assert watch.recent() == RecentCalls()


def _summary(status: int, code: str | None) -> RequestSummary:
    return replace(SUMMARY, status=status, error_code=code)
