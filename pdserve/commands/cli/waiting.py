"""What a start waits for, in words: what each process does by its own report, if it has one."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.protocol.status import ClusterStatus, NodeStatus


def waiting_text(
    names: Sequence[str], status: ClusterStatus | None, num_downloaded: int = 0
) -> str:
    """Name the processes that are not ready, and what they do; nothing if all are.

    Args:
        names: of the nodes.
        status: the last one; None: the coordinator has not answered yet.
        num_downloaded: bytes of a model that is being downloaded; 0: none is.
    """
    states = [] if status is not None else [f"{COORDINATOR} (importing)"]
    for name in names:
        state = state_text(None if status is None else status.node(name), num_downloaded)
        if state:
            states.append(f"{name} ({state})")
    return f"waiting for {', '.join(states)}" if states else ""


def state_text(node: NodeStatus | None, num_downloaded: int) -> str:
    """What one node does; nothing if it is ready."""
    if node is None:
        megabytes = num_downloaded / 1e6
        return f"downloading, {megabytes:.0f} MB so far" if num_downloaded else "importing"
    if node.state == "ready" or node.is_standby:
        return ""
    if node.state != "loading":
        return node.state
    if node.loading_progress < 1:
        return f"loading, {node.loading_progress:.0%}"
    return "measuring its steps"
