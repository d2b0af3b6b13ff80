"""The status of a cluster, from its coordinator's `GET /status`."""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.cluster.coordinator_http import request
from pdserve.errors import ClusterError
from pdserve.protocol import LinkState

_REPLY_S = 5.0


class FailingPeer(msgspec.Struct, frozen=True):
    """A node of the other pool with which handoffs fail."""

    peer: str
    error: str  # code of the last error
    failures: int  # in a row
    next_try_s: float  # until then, requests avoid the pair


class NodeStatus(msgspec.Struct, frozen=True):
    """One node as the coordinator sees it."""

    node_id: str
    role: Literal["prefill", "decode"]
    state: Literal["loading", "ready", "draining"]
    loading_progress: float  # 0..1
    incarnation: str
    session_address: str
    metrics_address: str
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    pinned_blocks: int
    queued_tokens: int
    running_requests: int
    waiting_requests: int
    step_time_ms: float
    predicted_queue_ms: float = 0.0  # for a prompt that arrives now
    predicted_tpot_ms: float = 0.0  # with one more stream
    transports: list[str] = []  # best first
    is_alone: bool = False  # no ready node of the other pool shares a transport with it
    failing: list[FailingPeer] = []
    links: list[LinkState] = []  # which nodes it pulls KV from, and how


class PrefixStatus(msgspec.Struct, frozen=True):
    """Effect of the prefix caches, as shares of prompt tokens."""

    cached_share: float = 0.0
    unstable_share: float = 0.0  # recomputed recently only because earlier text has changed
    unstable_token: int | None = None  # position of that text


class ClusterStatus(msgspec.Struct, frozen=True):
    """The coordinator and every node attached to it."""

    model: str
    mode: Literal["disaggregated", "colocated", "adaptive"]
    ready: bool
    inflight: int
    nodes: list[NodeStatus]
    waiting: int = 0  # requests that wait in the coordinator
    refused: dict[str, int] = {}  # requests refused so far, by reason
    prefixes: PrefixStatus = PrefixStatus()

    def node(self, node_id: str) -> NodeStatus | None:
        """The node with this id, if it is attached."""
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def waiting_for(self, node_ids: list[str]) -> str:
        """The nodes that are not ready, and why: "decode-0 (loading 40%)"."""
        parts = []
        for node_id in node_ids:
            node = self.node(node_id)
            if node is None:
                parts.append(f"{node_id} (not attached)")
            elif node.state == "loading":
                parts.append(f"{node_id} (loading {node.loading_progress:.0%})")
            elif node.state != "ready":
                parts.append(f"{node_id} ({node.state})")
        return ", ".join(parts)


async def fetch_status(url: str, timeout_s: float = _REPLY_S) -> ClusterStatus:
    """Ask the coordinator at `url`, such as "http://127.0.0.1:8000".

    Raises:
        ClusterError: no answer in time, or not a cluster's status.
    """
    code, content = await request("GET", url, "/status", timeout_s=timeout_s)
    if code != 200:
        raise ClusterError(f"{url}/status answers {code}, not 200")
    try:
        return msgspec.json.decode(content, type=ClusterStatus)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ClusterError(f"{url}/status is not a cluster's status: {error}") from error
