"""Describes nodes and waiting requests, for GET /status and for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from coordinator.admission import WaitingLine
from coordinator.admission.measured_promises import prompt_s, step_s
from coordinator.nodes.registry import Member, Registry
from coordinator.requests.running import RunningRequest
from coordinator.routing import Router
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole, NodeState, Sickness
from pdserve.protocol.status import FailingPeer, NodeStatus, RoleName, StateName, WaitingClass

ROLES: Final[Mapping[NodeRole, RoleName]] = {NodeRole.PREFILL: "prefill", NodeRole.DECODE: "decode"}
_STATES: dict[NodeState, StateName] = {
    NodeState.LOADING: "loading",
    NodeState.READY: "ready",
    NodeState.DRAINING: "draining",
    NodeState.SICK: "sick",
}


def describe_nodes(registry: Registry, router: Router) -> list[NodeStatus]:
    """Describe every member, sorted by node id."""
    members = sorted(registry, key=lambda m: m.node_id)
    return [_describe_node(member, router) for member in members]


def describe_waiting(waiting: Iterable[RunningRequest], now_s: float) -> list[WaitingClass]:
    """Describe the line by class; tenants are only counted, since this is public."""
    by_class: dict[str, list[RunningRequest]] = {}
    for running in waiting:  # oldest first
        by_class.setdefault(running.request.slo.name, []).append(running)
    return [
        WaitingClass(
            slo_class=name,
            requests=len(members),
            tenants=len({running.request.slo.tenant for running in members}),
            oldest_s=members[0].waited_s(now_s),
        )
        for name, members in by_class.items()
    ]


def watch_line(line: WaitingLine[RunningRequest], metrics: CoordinatorMetrics) -> None:
    """Add the gauges of the line."""
    metrics.watch("waiting_requests", "Requests that wait for room", lambda: len(line))
    metrics.watch_each(
        "slo_waiting_requests",
        "Of these, by class",
        "slo_class",
        lambda: Counter(running.request.slo.name for running in line),
    )
    metrics.watch(
        "waiting_payers",
        "Classes, or tenants within one, whose requests wait for room",
        lambda: line.num_payers,
    )


def watch_nodes(registry: Registry, metrics: CoordinatorMetrics) -> None:
    """Add the gauges of both pools."""
    metrics.watch_each(
        "ready_nodes",
        "Nodes that accept requests, by pool",
        "role",
        lambda: {role.name.lower(): len(registry.ready(role)) for role in NodeRole},
    )
    metrics.watch("attached_nodes", "Nodes in any state", lambda: registry.num_members)
    metrics.watch(
        "standby_nodes",
        "Loaded nodes that wait until a pool needs them",
        lambda: sum(member.is_standby for member in registry),
    )
    text = "Share of the KV blocks of decode nodes in use"
    metrics.watch("kv_cache_usage_ratio", text, lambda: _decode_kv_used(registry))
    _count_sick_nodes(registry, metrics)


def kv_used(nodes: Iterable[Member]) -> dict[RoleName, float]:
    """Return the share of KV blocks that is in use in each pool that has any of these nodes."""
    all_blocks, free_blocks = Counter[RoleName](), Counter[RoleName]()
    for node in nodes:
        all_blocks[ROLES[node.role]] += node.hello.num_blocks
        free_blocks[ROLES[node.role]] += node.load.free_blocks
    return {role: 1 - free_blocks[role] / total for role, total in all_blocks.items() if total}


def _decode_kv_used(registry: Registry) -> float:
    return kv_used(registry.ready(NodeRole.DECODE)).get("decode", 0.0)


def _count_sick_nodes(registry: Registry, metrics: CoordinatorMetrics) -> None:
    """Count each incarnation once. No gauge: a sick node is gone before the next scrape."""
    sick: set[Member] = set()

    def changed(member: Member) -> None:
        if member.load.state is NodeState.SICK and member not in sick:
            sick.add(member)
            metrics.nodes_sick.labels(Sickness.of(member.load.reason) or "other").inc()

    registry.on_changed(changed)
    registry.on_lost(sick.discard)


def watch_router(router: Router, metrics: CoordinatorMetrics) -> None:
    """Add what fails between the pools, and how well answers' lengths are foreseen."""
    health, lengths = router.health, router.lengths
    metrics.watch(
        "failing_pairs",
        "Pairs of a prefill and a decode node whose last handoff failed",
        lambda: health.num_failing,
    )
    metrics.count(
        "pair_failures",
        "How often such a pair was found to fail; other requests avoid it for a while",
        lambda: health.num_failures,
    )
    metrics.count_each(
        "output_tokens_off",
        "Tokens by which answers differed from what was expected: by their kind, or by one mean",
        "by",
        lambda: {str(by): tokens for by, tokens in lengths.off_tokens.items()},
    )


def _describe_node(member: Member, router: Router) -> NodeStatus:
    hello, load, outlook = member.hello, member.load, router.node_outlook(member)
    return NodeStatus(
        node_id=hello.node_id,
        role=ROLES[member.role],
        state=_STATES[load.state],
        reason=load.reason,
        is_standby=member.is_standby,
        loading_progress=load.loading_progress,
        incarnation=hello.incarnation,
        revision=hello.revision,
        weights=hello.weights,
        session_address=hello.session_address,
        metrics_address=hello.metrics_address,
        num_blocks=hello.num_blocks,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        pinned_blocks=load.pinned_blocks,
        queued_tokens=load.queued_tokens,
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        step_time_ms=load.step_time_s * 1e3,
        predicted_queue_ms=outlook.queue_s * 1e3,
        predicted_tpot_ms=outlook.tpot_s * 1e3,
        transports=[reach.name for reach in hello.transports],
        is_alone=router.pairs.is_alone(member),
        failing=_describe_failing(member, router),
        links=load.links,
        program_version=hello.program_version,
        coordinators=load.num_coordinators,
        leader=load.leader,
        clock_offset_ms=member.clock.ms,
        event_loop_lag_ms=load.loop_lag_s * 1e3,
        certificate_ends_at=load.certificate_ends_at,
        prefill_ratio=load.prefill_ratio,
        decode_ratio=load.decode_ratio,
        profiled_prompt_ms=prompt_s(member.perf) * 1e3 if member.perf else 0.0,
        profiled_step_ms=step_s(member.perf) * 1e3 if member.perf else 0.0,
        drafts=load.drafts,
        no_drafts=load.no_drafts,
        place_of=hello.place_of,
    )


def _describe_failing(member: Member, router: Router) -> list[FailingPeer]:
    """Describe the nodes with which a member's handoffs fail."""
    return [
        FailingPeer(
            peer=peer,
            error=failures.code,
            failures=failures.count,
            next_try_s=router.health.next_try_in_s(failures),
            is_tried=failures.is_tried,
        )
        for peer, failures in sorted(router.health.of(member).items())
    ]
