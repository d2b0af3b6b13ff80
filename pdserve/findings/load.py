"""Whether the pools are saturated, and whether calls are refused or fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdserve.findings.finding import Finding, ok, problem, warning
from pdserve.protocol.status import ClusterStatus, NodeStatus, RoleName

_QUEUES, _CALLS = "load", "calls"
_LONG_S = 10.0
_KV_FULL = 0.95  # as in the alert
_MOST_FAILED = 0.01  # as in the alert
_MORE = {
    "prefill": "add prefill nodes, or move one: pdserve role NODE prefill",
    "decode": "add decode nodes, or move one: pdserve role NODE decode",
}
_REFUSED_ADVICE = {
    "rate_limit_exceeded": "tenants are beyond their own limits: `pdserve usage` says who asks for "
    "what; raise requests_per_minute or tokens_per_minute in the key file if they may have more",
    "slo_unreachable": "their class promises more than the pools can keep now: add nodes, or "
    "loosen the promise (--slo-classes)",
    "overloaded": "the line is full: add nodes, or raise routing.max_waiting or max_inflight",
}


def load_findings(status: ClusterStatus) -> list[Finding]:
    """Queues, KV and places."""
    found = [*_line(status), *_places(status), *_prefill_queue(status), *_kv(status)]
    return found or [
        ok(_QUEUES, f"{status.inflight} requests are on the nodes, {status.waiting} in line")
    ]


def call_findings(status: ClusterStatus) -> list[Finding]:
    """Calls of the last minute that were refused, or failed."""
    recent = status.coordinator.recent_calls
    found = [
        warning(
            _CALLS,
            f"{count} of {recent.calls} calls of the last minute were refused ({code})",
            _REFUSED_ADVICE.get(code, "docs/API.md says what the code stands for"),
        )
        for code, count in recent.refused.items()
    ]
    failed = sum(recent.failed.values())
    if failed > _MOST_FAILED * recent.calls:
        found.append(_failing(recent.failed, failed, recent.calls))
    return found or [ok(_CALLS, f"{recent.calls} ended within the last minute, {failed} failed")]


def _failing(codes: Mapping[str, int], failed: int, calls: int) -> Finding:
    told = ", ".join(f"{count} with {code}" for code, count in codes.items())
    return problem(
        _CALLS,
        f"{failed} of {calls} calls of the last minute failed: {told}",
        "see PdserveRequestsFail in docs/RUNBOOK.md, and the coordinator's log",
    )


def _line(status: ClusterStatus) -> Iterator[Finding]:
    places = max(1, status.coordinator.max_waiting // status.coordinators)
    oldest_s = max((waiting.oldest_s for waiting in status.waiting_by_class), default=0.0)
    if status.coordinator.max_waiting and status.waiting >= places:
        what = f"the line of {places} is full: whoever comes is refused"
        yield problem(_QUEUES, what, "add nodes; the next lines say of which pool")
    elif oldest_s > _LONG_S:
        what = f"{status.waiting} requests wait in line, the first for {oldest_s:.0f} s"
        yield warning(_QUEUES, what, "add nodes, unless it is batches that are worked off")
    if status.coordinator.max_inflight and status.inflight >= status.coordinator.max_inflight:
        what = f"all {status.coordinator.max_inflight} requests that max_inflight allows run"
        yield warning(_QUEUES, what, "raise max_inflight if the nodes have room")


def _places(status: ClusterStatus) -> Iterator[Finding]:
    pool = _ready(status, "decode")
    if pool and all(node.waiting_requests for node in pool):
        waiting = sum(node.waiting_requests for node in pool)
        what = f"no decode node has a free place: {waiting} requests wait there for one"
        yield warning(_QUEUES, what, _MORE["decode"])


def _prefill_queue(status: ClusterStatus) -> Iterator[Finding]:
    pool = _ready(status, "prefill")
    queue_s = min((node.predicted_queue_ms for node in pool), default=0.0) / 1e3
    if queue_s > _LONG_S:
        what = f"a new prompt waits {queue_s:.0f} s at the best prefill node"
        yield warning(_QUEUES, what, _MORE["prefill"])


def _kv(status: ClusterStatus) -> Iterator[Finding]:
    roles: tuple[RoleName, ...] = ("prefill", "decode")
    for role in roles:
        pool = _ready(status, role)
        blocks = sum(node.num_blocks for node in pool)
        used = 1 - sum(node.free_blocks for node in pool) / blocks if blocks else 0.0
        if used > _KV_FULL:
            advice = f"{_MORE[role]}; or give them more --kv-memory"
            if any("KV as bfloat16" in node.weights for node in pool):
                advice += ", or on CPUs all nodes --kv-dtype int8, which takes half of it"
            if role == "prefill":
                advice = "its KV is not pulled: the decode pool is too small, or see kv-links"
            yield warning(_QUEUES, f"{used:.0%} of the {role} pool's KV blocks are in use", advice)


def _ready(status: ClusterStatus, role: RoleName) -> list[NodeStatus]:
    return [node for node in status.nodes if node.role == role and node.state == "ready"]
