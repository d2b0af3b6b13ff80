"""What `/status` says of a node, as far as an autoscaler asks."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pdserve.protocol.status import NodeStatus, RoleName

_READY = NodeStatus(
    node_id="",
    role="decode",
    state="ready",
    loading_progress=1.0,
    incarnation="1",
    session_address="",
    metrics_address="",
    num_blocks=100,
    free_blocks=100,
    cached_blocks=0,
    pinned_blocks=0,
    queued_tokens=0,
    running_requests=0,
    waiting_requests=0,
    step_time_ms=0.0,
)


def node_status(node_id: str, role: RoleName, **changes: Any) -> NodeStatus:
    """A node that is ready and idle, but for these fields."""
    addresses = {"session_address": f"{node_id}:1", "metrics_address": f"{node_id}:2"}
    return replace(_READY, node_id=node_id, role=role, **(addresses | changes))
