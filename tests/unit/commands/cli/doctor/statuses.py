"""The status of a healthy cluster, and of one that differs from it in something."""

from __future__ import annotations

from msgspec.structs import replace

from pdserve.protocol import LinkState
from pdserve.protocol.status import (
    AbsentNode,
    ClusterStatus,
    CoordinatorStatus,
    NodeStatus,
    RecentCalls,
)

URL, OTHER = "http://a:8000", "http://b:8000"
BEST = "the best transport there is"


def node(node_id: str) -> NodeStatus:
    return NodeStatus(
        node_id=node_id,
        role=node_id.split("-")[0],
        state="ready",
        loading_progress=1.0,
        incarnation="i",
        revision="4f0c+d1",
        session_address="10.0.0.2:5000",
        metrics_address="10.0.0.2:5001",
        num_blocks=100,
        free_blocks=90,
        cached_blocks=40,
        pinned_blocks=0,
        queued_tokens=0,
        running_requests=1,
        waiting_requests=0,
        step_time_ms=1.0,
        transports=["shm", "tcp"],
        program_version="0.1.0",
        clock_offset_ms=-0.4,
        event_loop_lag_ms=12.0,
        prefill_ratio=1.1,
        decode_ratio=0.9,
        profiled_prompt_ms=40.0,
        profiled_step_ms=4.0,
    )


NODES = {name: node(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")}
NODES["decode-0"] = replace(NODES["decode-0"], links=[LinkState("prefill-0", "shm", BEST)])
PROCESS = CoordinatorStatus(
    incarnation="c",
    program_version="0.1.0",
    event_loop_lag_ms=3.0,
    max_inflight=100,
    max_waiting=50,
    recent_calls=RecentCalls(calls=500),
)
LOST = AbsentNode(node_id="decode-7", absence="lost", reason="its stream broke", since_s=12.3)
HEALTHY = ClusterStatus(
    model="m", mode="disaggregated", ready=True, inflight=3, nodes=[], coordinator=PROCESS
)


def cluster(process: CoordinatorStatus = PROCESS, **changes: dict[str, object]) -> ClusterStatus:
    """The healthy one, but with these fields of nodes (`decode_0`) and the cluster (`status`)."""
    of_cluster = changes.pop("status", {})
    nodes = [replace(n, **changes.get(n.node_id.replace("-", "_"), {})) for n in NODES.values()]
    return replace(HEALTHY, **({"nodes": nodes, "coordinator": process} | of_cluster))
