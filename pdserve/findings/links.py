"""Whether nodes reach each other, and over which transports KV moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdserve.findings.finding import Finding, names, ok, problem, warning
from pdserve.protocol import LinkState
from pdserve.protocol.status import ClusterStatus, FailingPeer, NodeStatus

_CHECK = "kv-links"
# Why a better transport is not for two nodes, as long as they are where they are.
_NO_FAULT = (
    "another host",
    "another PID namespace",
    "both processes are on GPU",
    "moves ",  # memory of another kind than the pool
    "no RDMA device",
)


def pair_findings(status: ClusterStatus) -> list[Finding]:
    """Pairs of nodes between which no KV moves."""
    found = [
        *(_alone(node, status) for node in status.nodes if node.is_alone),
        *(
            _failing(node, failing)
            for node in status.nodes
            if node.role == "prefill"  # its decode node tells the same
            for failing in node.failing
        ),
    ]
    return found or [ok(_CHECK, "no handoff fails between any two nodes")]


def transport_findings(status: ClusterStatus) -> list[Finding]:
    """Links over a slower transport than both ends could have, and nodes that lack one."""
    found = [
        *_lacking(status.nodes),
        *(finding for node in status.nodes for link in node.links for finding in _slow(node, link)),
    ]
    used = sorted({link.transport for node in status.nodes for link in node.links})
    in_use = f"in use: {names(used)}" if used else "no KV has moved yet"
    return found or [ok(_CHECK, f"no link fell back to a slower transport ({in_use})")]


def fall_backs(link: LinkState) -> Iterator[tuple[str, str]]:
    """Yield the better transports that a link could not take, each with the reason."""
    for told in link.reason.split("; "):
        transport, _, reason = told.partition(": ")
        if reason:
            yield transport, reason


def _alone(node: NodeStatus, status: ClusterStatus) -> Finding:
    other = "decode" if node.role == "prefill" else "prefill"
    theirs = {name for peer in status.nodes if peer.role == other for name in peer.transports}
    return problem(
        _CHECK,
        f"{node.node_id} shares no KV transport with any {other} node: it has "
        f"{_listed(node.transports)}, they have {_listed(theirs)}",
        "give all nodes the same `transports`, with tcp among them; where they have, their "
        "revisions differ, or `pdserve doctor` on its machine says what is missing there",
    )


def _failing(node: NodeStatus, failing: FailingPeer) -> Finding:
    return problem(
        _CHECK,
        f"{failing.peer} gets no KV from {node.node_id} ({failing.told})",
        f"check that {failing.peer}'s machine reaches {node.session_address} and the ports of its "
        "transports: `host` or `advertise` of both, a firewall, the limit of open files",
    )


def _lacking(nodes: Iterable[NodeStatus]) -> Iterator[Finding]:
    """Yield the nodes that do not offer what others do."""
    nodes = [node for node in nodes if node.transports]  # none before it listens
    offered = {name for node in nodes for name in node.transports}
    for node in nodes:
        if missing := offered.difference(node.transports):
            yield warning(
                _CHECK,
                f"{node.node_id} offers only {_listed(node.transports)} for KV, others offer "
                f"{names(missing)} too",
                "compare its `transports` with theirs; `pdserve doctor` on its machine says "
                "whether it could",
            )


def _slow(node: NodeStatus, link: LinkState) -> Iterator[Finding]:
    for transport, reason in fall_backs(link):
        if not any(harmless in reason for harmless in _NO_FAULT):
            yield warning(
                _CHECK,
                f"{node.node_id} pulls from {link.peer} by {link.transport} and not by "
                f"{transport}: {reason}",
                f"run `pdserve doctor` on both machines, and compare their `transports`; once "
                f"mended, {node.node_id} takes {transport} when it connects anew",
            )


def _listed(transports: Iterable[str]) -> str:
    transports = list(transports)
    return names(transports) if transports else "none"
