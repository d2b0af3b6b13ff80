"""Nodes that are sick, gone, or not let in."""

from __future__ import annotations

from pdserve.findings.finding import Finding, ok, problem, warning
from pdserve.protocol import Sickness
from pdserve.protocol.status import AbsentNode, ClusterStatus, NodeStatus

_CHECK = "nodes"
_FRESH_S = 600.0  # a node that was lost longer ago has been given up, or has another name now
_SICK_ADVICE = {
    Sickness.ENGINE_DEAD: "its log has the error, which is a bug: report it",
    Sickness.ENGINE_STUCK: "its log has the stacks of its threads: report it",
    Sickness.STEPS_FAIL: "its log has the errors; compare its weights with those of other nodes",
    Sickness.RANK_LOST: "look for the kernel's out-of-memory killer in dmesg",
    Sickness.DEVICE_FAULT: "look at its GPU; if it happens again, take the machine out",
}


def node_findings(status: ClusterStatus) -> list[Finding]:
    """Nodes that should serve and do not."""
    found = [
        *(_sick(node) for node in status.nodes if node.state == "sick"),
        *(_ABSENT[node.absence](node) for node in status.coordinator.absent),
        *(
            _loading(node)
            for node in status.nodes
            if node.state == "loading" and not node.is_standby
        ),
    ]
    draining = sum(node.state == "draining" for node in status.nodes)
    standby = sum(node.is_standby for node in status.nodes)
    told = f", {draining} of them draining" if draining else ""
    told += f", {standby} on standby" if standby else ""
    return found or [ok(_CHECK, f"{len(status.nodes)} are attached{told}")]


def _sick(node: NodeStatus) -> Finding:
    kind = Sickness.of(node.reason)
    advice = _SICK_ADVICE[kind] if kind else "its log says more"
    what = f"{node.node_id} is sick, and about to end: {node.reason}"
    return problem(_CHECK, what, advice)


def _loading(node: NodeStatus) -> Finding:
    what = f"{node.node_id} is loading ({node.loading_progress:.0%})"
    return warning(_CHECK, what, "wait; if this does not grow, look at its disk and at its log")


def _lost(node: AbsentNode) -> Finding:
    level = problem if node.since_s < _FRESH_S else warning
    return level(
        _CHECK,
        f"{node.node_id} was lost {node.since_s:.0f} s ago, without a drain: {node.reason}",
        "look at the end of its log and at its exit code; if its process is there but silent, end "
        "it with SIGKILL; if it was taken away on purpose, this is forgotten within an hour",
    )


def _refused(node: AbsentNode) -> Finding:
    return problem(
        _CHECK,
        f"{node.node_id or 'a node'} is refused: {node.reason}",
        "change what it was started with; it tries again by itself",
    )


_ABSENT = {"lost": _lost, "refused": _refused}
