"""What a coordinator says about its cluster at `GET /status`."""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.errors import ClusterError
from pdserve.protocol import LinkState

_REPLY_S = 5.0


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
    predicted_queue_ms: float = 0.0  # before a prompt that were sent there now
    predicted_tpot_ms: float = 0.0  # of one stream more
    links: list[LinkState] = []  # from whom it pulls KV, and how


class PrefixStatus(msgspec.Struct, frozen=True):
    """What prefix caches did for prompts; shares of their tokens."""

    cached_share: float = 0.0
    unstable_share: float = 0.0  # of recent ones: computed again only because of text before them
    unstable_token: int | None = None  # where that text begins


class ClusterStatus(msgspec.Struct, frozen=True):
    """The coordinator and every node attached to it."""

    model: str
    mode: Literal["disaggregated", "colocated", "adaptive"]
    ready: bool
    inflight: int
    nodes: list[NodeStatus]
    waiting: int = 0  # requests without a promise, in the coordinator
    refused: dict[str, int] = {}  # so far, by reason
    prefixes: PrefixStatus = PrefixStatus()

    def node(self, node_id: str) -> NodeStatus | None:
        """The node of that id, if it is attached."""
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def waiting_for(self, node_ids: list[str]) -> str:
        """Those of the nodes that are not ready, and why: "decode-0 (loading 40%)"."""
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
    """Ask the coordinator at `url`, as in "http://127.0.0.1:8000".

    Raises:
        ClusterError: nobody answers there in time, or not with a cluster's status.
    """
    import aiohttp  # takes longer to load than all of a supervisor, whose children run by then

    limit = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.get(url.rstrip("/") + "/status") as response,
        ):
            content = await response.read()
            if response.status != 200:
                raise ClusterError(f"{url}/status answers {response.status}, not 200")
    except TimeoutError as error:
        raise ClusterError(f"no answer from {url} within {timeout_s:g} s") from error
    except aiohttp.ClientConnectorError as error:
        raise ClusterError(f"no coordinator at {url}: {error.strerror}") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise ClusterError(f"no coordinator at {url}: {error}") from error
    try:
        return msgspec.json.decode(content, type=ClusterStatus)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ClusterError(f"{url}/status is not a cluster's status: {error}") from error
