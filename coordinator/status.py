"""The nodes, and who waits, as GET /status shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from coordinator.registry import Member, Registry
from coordinator.routing import NodeOutlook, Router
from coordinator.running import RunningRequest

MOST_PAYERS: Final = 20  # that are shown


def describe_nodes(registry: Registry, router: Router) -> list[dict[str, object]]:
    """Every member, JSON-ready, by name."""
    members = sorted(registry, key=lambda m: m.node_id)
    return [_describe_node(member, router.node_outlook(member)) for member in members]


def describe_waiting(waiting: Iterable[RunningRequest], now_s: float) -> list[dict[str, object]]:
    """The payers who have most requests in the line, with these; JSON-ready."""
    oldest: dict[str, RunningRequest] = {}
    counts: Counter[str] = Counter()
    for running in waiting:
        payer = running.request.slo.payer
        counts[payer] += 1
        oldest.setdefault(payer, running)
    return [
        {"payer": payer, "requests": count, "oldest_s": oldest[payer].waited_s(now_s)}
        for payer, count in counts.most_common(MOST_PAYERS)
    ]


def waiting_by_class(waiting: Iterable[RunningRequest]) -> Counter[str]:
    """Class |-> how many of its requests wait."""
    return Counter(running.request.slo.name for running in waiting)


def _describe_node(member: Member, outlook: NodeOutlook) -> dict[str, object]:
    hello, load = member.hello, member.load
    return {
        "node_id": hello.node_id,
        "role": member.role.name.lower(),
        "state": load.state.name.lower(),
        "loading_progress": load.loading_progress,
        "incarnation": hello.incarnation,
        "session_address": hello.session_address,
        "metrics_address": hello.metrics_address,
        "num_blocks": hello.num_blocks,
        "free_blocks": load.free_blocks,
        "cached_blocks": load.cached_blocks,
        "pinned_blocks": load.pinned_blocks,
        "queued_tokens": load.queued_tokens,
        "running_requests": load.running_requests,
        "waiting_requests": load.waiting_requests,
        "step_time_ms": load.step_time_s * 1e3,
        "predicted_queue_ms": outlook.queue_s * 1e3,
        "predicted_tpot_ms": outlook.tpot_s * 1e3,
        "links": msgspec.to_builtins(load.links),
    }
