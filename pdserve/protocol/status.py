"""The answer to `GET /status`, as JSON: the coordinator, its nodes and its waiting requests.

It goes to people and scripts, so it is not on the gRPC wire. A reader of version n understands all
answers of version n: fields may be added, but if one is removed or changes its meaning,
STATUS_VERSION rises.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.protocol.message import Message
from pdserve.protocol.nodes import DraftState, LinkState
from pdserve.settings.config import Mode
from pdserve.shared.costs import TokenCosts
from pdserve.shared.errors import MalformedMessage

STATUS_VERSION = 1

RoleName = Literal["prefill", "decode"]
StateName = Literal["loading", "ready", "draining", "sick"]
Absence = Literal["lost", "refused"]  # without having drained; not let in


class FailingPeer(Message, frozen=True):
    """A node of the other pool with which handoffs fail."""

    peer: str
    error: str  # code of the last error
    failures: int  # in a row
    next_try_s: float  # until then, requests avoid the pair
    is_tried: bool = False  # by a request; until its outcome is known, others avoid the pair

    @property
    def told(self) -> str:
        """The error, how often it came, and what follows."""
        follows = "tried again by the next request"
        if self.is_tried:
            follows = "being tried again"
        elif self.next_try_s > 0:
            follows = f"tried again in {self.next_try_s:.0f} s"
        return f"{self.error}, {self.failures} in a row, {follows}"


class NodeStatus(Message, frozen=True, kw_only=True):
    """One node as the coordinator sees it."""

    node_id: str
    role: RoleName
    state: StateName
    reason: str = ""  # why it is sick
    is_standby: bool = False  # "loading" no more, but waits until a pool needs it
    loading_progress: float  # 0..1
    incarnation: str
    revision: str = ""  # the weights, as quantized, and the arithmetic of the kernels
    weights: str = ""  # what they are stored, packed and computed with as
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
    program_version: str = ""  # of pdserve; empty: it does not tell
    coordinators: int = 1  # to which it is attached
    leader: str = ""  # that one of them which may do what only one may do: an incarnation
    # Its clock is that far ahead of the coordinator's, less the time that a message takes; None: it
    # does not tell.
    clock_offset_ms: float | None = None
    event_loop_lag_ms: float = 0.0  # the longest one of the last minute
    certificate_ends_at: float = 0.0  # seconds since 1970; 0: there is none, or it does not tell
    # Time of its steps with prompt chunks, and of those without: actual / profiled; 0: none seen.
    prefill_ratio: float = 0.0
    decode_ratio: float = 0.0
    # What it measured as it started: a prompt of 1024 tokens, a step of 16 streams; 0: not yet.
    profiled_prompt_ms: float = 0.0
    profiled_step_ms: float = 0.0
    drafts: list[DraftState] = []  # tokens that it has guessed, by source
    no_drafts: str = ""  # why it guesses none
    model: str = ""  # that it serves; empty: the only one
    place_of: str = ""  # the node whose cores and memory it shares with other models; empty: none


class AbsentNode(Message, frozen=True, kw_only=True):
    """A node that is no member."""

    node_id: str  # or where it is, if it was refused before it could say
    absence: Absence
    reason: str
    since_s: float  # it was lost, or refused for the last time
    model: str = ""  # as which it was ready; empty: it was not, or there is only one


class RecentCalls(Message, frozen=True, kw_only=True):
    """How the calls of about the last minute ended."""

    calls: int = 0
    refused: dict[str, int] = {}  # with a 429, by error code
    failed: dict[str, int] = {}  # through no fault of their clients, by error code


class AdapterStatus(Message, frozen=True, kw_only=True):
    """An adapter that clients may ask for."""

    name: str
    digest: str = ""  # empty: one of the settings, that is not loaded yet
    num_bytes: int = 0
    nodes: list[str] = []  # that have it; others load it when a request needs it
    refusals: dict[str, str] = {}  # why nodes could not load it, by node id; "": why none did


class CoordinatorStatus(Message, frozen=True, kw_only=True):
    """The process that answers."""

    incarnation: str = ""
    program_version: str = ""  # of pdserve; empty: older than this struct
    event_loop_lag_ms: float = 0.0  # the longest one of the last minute
    has_tls: bool = False  # its nodes have to show certificates
    certificate_ends_at: float = 0.0  # seconds since 1970; 0: there is none, or it cannot tell
    revision_shares: dict[str, float] = {}  # by the first characters of revisions
    max_inflight: int = 0  # requests on the nodes; 0: it does not tell
    max_waiting: int = 0  # places in its line; 0: it does not tell
    recent_calls: RecentCalls = RecentCalls()
    absent: list[AbsentNode] = []
    desired_nodes: dict[RoleName, int] = {}  # that each pool should have; empty: not known yet
    costs: TokenCosts | None = None  # of the last minutes; None: it does not know what nodes cost
    adapters: list[AdapterStatus] = []  # by name


class WaitingClass(Message, frozen=True):
    """The requests of one service class that wait in the coordinator."""

    slo_class: str
    requests: int
    tenants: int  # only their number, since the status is public
    oldest_s: float  # for how long the first of them has waited


class PrefixStatus(Message, frozen=True):
    """Effect of the prefix caches, as shares of prompt tokens."""

    cached_share: float = 0.0
    unstable_share: float = 0.0  # recomputed recently only because earlier text has changed
    unstable_token: int | None = None  # position of that text


class ModelStatus(Message, frozen=True, kw_only=True):
    """One of several models, beside its nodes."""

    name: str
    ready: bool  # a request for it that arrives now can be served
    wake_s: float = 0.0  # in which it is expected to have nodes; 0: it has, or nobody knows
    inflight: int  # requests on its nodes
    waiting: int = 0  # requests for it that wait in the coordinator
    refused: dict[str, int] = {}  # requests refused so far, by reason
    prefixes: PrefixStatus = PrefixStatus()


class ClusterStatus(Message, frozen=True, kw_only=True):
    """The coordinator and every node attached to it."""

    version: int = STATUS_VERSION
    model: str  # its name; several with ", " in between
    mode: Mode
    ready: bool  # a request that arrives now can be served
    wake_s: float = 0.0  # as of ModelStatus, for one model
    coordinators: int = 1  # that use these nodes
    inflight: int  # requests on the nodes
    waiting: int = 0  # requests that wait in the coordinator
    waiting_by_class: list[WaitingClass] = []
    refused: dict[str, int] = {}  # requests refused so far, by reason
    prefixes: PrefixStatus = PrefixStatus()
    nodes: list[NodeStatus]  # by node id
    coordinator: CoordinatorStatus = CoordinatorStatus()
    models: list[ModelStatus] = []  # each, where there are several

    def of_model(self, model: ModelStatus) -> ClusterStatus:
        """The part of it that is about one of several models."""
        return msgspec.structs.replace(
            self,
            model=model.name,
            ready=model.ready,
            wake_s=model.wake_s,
            inflight=model.inflight,
            waiting=model.waiting,
            refused=model.refused,
            prefixes=model.prefixes,
            nodes=[node for node in self.nodes if node.model == model.name],
            models=[],
        )

    def node(self, node_id: str) -> NodeStatus | None:
        """The node with this id, if it is attached."""
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def waiting_for(self, node_ids: list[str]) -> str:
        """The nodes that are neither ready nor on standby: "decode-0 (loading 40%)".

        Also adapters of the settings, until they are served, or a node has said why not.
        """
        parts = []
        for node_id in node_ids:
            node = self.node(node_id)
            if node is None:
                parts.append(f"{node_id} (not attached)")
            elif node.is_standby:
                continue
            elif node.state == "loading":
                parts.append(f"{node_id} (loading {node.loading_progress:.0%})")
            elif node.state == "sick":
                parts.append(f"{node_id} (sick: {node.reason})")
            elif node.state != "ready":
                parts.append(f"{node_id} ({node.state})")
        parts += [
            f"adapter {adapter.name} (loading)"
            for adapter in self.coordinator.adapters
            if not adapter.digest and not adapter.refusals
        ]
        return ", ".join(parts)


class _Version(msgspec.Struct, frozen=True):
    """What every version of the answer begins with."""

    version: int


def read_status(content: bytes) -> ClusterStatus:
    """Read the body of an answer.

    Raises:
        MalformedMessage: it is not a status, or one of another version.
    """
    try:
        version = msgspec.json.decode(content, type=_Version).version
        if version == STATUS_VERSION:
            return msgspec.json.decode(content, type=ClusterStatus)
    except msgspec.DecodeError as error:
        raise MalformedMessage(f"not a cluster's status: {error}") from error
    raise MalformedMessage(
        f"a cluster's status of version {version}, but this pdserve reads version "
        f"{STATUS_VERSION}: use the pdserve that runs the cluster"
    )
