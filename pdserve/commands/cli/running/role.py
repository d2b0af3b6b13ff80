"""`pdserve role`: moves a node to the other pool, without a restart."""

from __future__ import annotations

import asyncio

import msgspec

from pdserve.commands.cluster.admin import post_admin
from pdserve.commands.cluster.coordinator_http import Trust
from pdserve.commands.cluster.status import fetch_status
from pdserve.protocol.status import ClusterStatus, NodeStatus
from pdserve.shared.process.exit_codes import OK

_SLACK_S = 2.0  # for the answer, after the coordinator's own deadline


class _Answer(msgspec.Struct, frozen=True):
    changed: bool


def run(
    url: str,
    node_id: str,
    role: str,
    trust: Trust = True,
    *,
    timeout_s: float,
    force: bool,
    slack_s: float = _SLACK_S,
) -> int:
    """Change the role of a node of the cluster at `url`, and print the result; the exit code.

    Raises:
        PdserveError: no answer, no such node, the node refuses, or it does not change in time.
    """
    body = {"node": node_id, "role": role, "timeout_s": timeout_s, "force": force}
    changed, status = asyncio.run(_change(url, body, timeout_s + slack_s, trust))
    print(_told(status, node_id, role, changed=changed))
    return OK


async def _change(
    url: str, body: dict[str, object], timeout_s: float, trust: Trust
) -> tuple[bool, ClusterStatus]:
    answer = await post_admin(
        url, "/admin/role", body, answer=_Answer, timeout_s=timeout_s, trust=trust
    )
    return answer.changed, await fetch_status(url, trust=trust)


def _told(status: ClusterStatus, node_id: str, role: str, *, changed: bool) -> str:
    """The message for the user after a change."""
    said = f"{node_id} is a {role} node {'now' if changed else 'already'}"
    node = status.node(node_id)
    if changed and node is not None and (under_way := _num_under_way(node)):
        said += f"; requests it had begun and is finishing: {under_way}"
    pools = {kind: sum(n.role == kind for n in status.nodes) for kind in ("prefill", "decode")}
    return f"{said}\n{pools['prefill']} prefill, {pools['decode']} decode"


def _num_under_way(node: NodeStatus) -> int:
    return node.running_requests + node.waiting_requests
