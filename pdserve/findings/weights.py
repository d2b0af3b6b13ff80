"""What nodes have the weights as."""

from __future__ import annotations

from collections import defaultdict

from pdserve.findings.finding import Finding, names, ok
from pdserve.protocol.status import ClusterStatus


def weight_findings(status: ClusterStatus) -> list[Finding]:
    """What they are stored, packed and computed with as, and which nodes have them so."""
    owners: dict[str, list[str]] = defaultdict(list)
    for node in status.nodes:
        owners[node.weights].append(node.node_id)
    return [ok("weights", f"{told} ({names(who)})") for told, who in owners.items() if told]
