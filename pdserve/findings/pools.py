"""Whether there are the nodes that the cluster's mode needs."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.findings.finding import Finding, ok, problem
from pdserve.protocol.status import ClusterStatus, NodeStatus, RoleName
from pdserve.settings.config import Mode

_CHECK = "pools"
_NEEDED: dict[Mode, tuple[RoleName, ...]] = {
    "disaggregated": ("prefill", "decode"),
    "colocated": ("decode",),
    "adaptive": (),  # any node serves a request alone
    "flowing": (),
    "multiplexed": ("decode",),
}


def pool_findings(status: ClusterStatus) -> list[Finding]:
    """Missing pools, and a cluster that cannot serve for another reason."""
    found = [
        _missing(role, [node for node in status.nodes if node.role == role])
        for role in _NEEDED[status.mode]
        if not _num_ready(status, role)
    ]
    if not found and not status.ready:
        found = [_not_ready(status)]
    return found or [
        ok(
            _CHECK,
            f"ready: {_num_ready(status, 'prefill')} prefill and "
            f"{_num_ready(status, 'decode')} decode nodes ({status.mode})",
        )
    ]


def _num_ready(status: ClusterStatus, role: RoleName) -> int:
    return sum(node.role == role and node.state == "ready" for node in status.nodes)


def _missing(role: RoleName, pool: Sequence[NodeStatus]) -> Finding:
    states = ", ".join(
        f"{node.node_id} is {'on standby' if node.is_standby else node.state}" for node in pool
    )
    advice = f"start one (pdserve {role}), or move one there: pdserve role NODE {role}"
    if any(node.state == "loading" and not node.is_standby for node in pool):
        advice = "wait until it has loaded"
    return problem(_CHECK, f"no {role} node is ready ({states or 'none is attached'})", advice)


def _not_ready(status: ClusterStatus) -> Finding:
    if not any(node.state == "ready" for node in status.nodes):
        return problem(_CHECK, "no node is ready", "start one: pdserve prefill, pdserve decode")
    return problem(
        _CHECK,
        "no request can be served, though both pools have ready nodes",
        "KV cannot move from any prefill to any decode node: see kv-links and versions",
    )
