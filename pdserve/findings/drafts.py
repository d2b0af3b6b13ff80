"""What comes of tokens that decode nodes guess, and which nodes guess none."""

from __future__ import annotations

from collections import defaultdict

from pdserve.findings.finding import Finding, names, ok
from pdserve.protocol.status import ClusterStatus, NodeStatus

_DRAFTS = "drafts"


def draft_findings(status: ClusterStatus) -> list[Finding]:
    """Of prompts nothing is guessed."""
    silent: dict[str, list[str]] = defaultdict(list)
    guessing = []
    for node in status.nodes:
        if node.role == "decode" and node.no_drafts:
            silent[node.no_drafts].append(node.node_id)
        elif node.role == "decode" and (said := said_of_drafts(node)):
            guessing.append(ok(_DRAFTS, f"{node.node_id} has guessed {said}"))
    found = [ok(_DRAFTS, f"{names(who)}: a token a step, as {why}") for why, who in silent.items()]
    return found + guessing or [ok(_DRAFTS, "nothing has been guessed yet")]


def said_of_drafts(node: NodeStatus) -> str:
    """What has come of each source's tokens; empty: it has guessed none."""
    said = [
        f"{one.drafted} tokens by {one.source} ({one.accepted / one.drafted:.0%} right)"
        for one in node.drafts
        if one.drafted
    ]
    if said:
        said += [
            f"with {one.kv_bytes >> 20} MiB of kv_memory for the {one.source}'s own KV "
            f"({one.used_kv_bytes / one.kv_bytes:.0%} in use)"
            for one in node.drafts
            if one.kv_bytes
        ]
    return ", ".join(said)
