"""Who a node is, where it is in its life, and how it is doing."""

from __future__ import annotations

from enum import IntEnum
from math import inf

from pdserve.errors import MalformedMessage
from pdserve.kv_layout import KvLayout
from pdserve.protocol.message import Message


class NodeRole(IntEnum):
    """Which pool a node belongs to."""

    PREFILL = 1
    DECODE = 2


class NodeState(IntEnum):
    """Where a node is in its life; only READY nodes are given new legs."""

    LOADING = 1
    READY = 2
    DRAINING = 3


class NodeAddress(Message, frozen=True):
    """Where one life of a node exports its KV, and what opens its door to the addressee."""

    node_id: str
    incarnation: str
    session_address: str  # host:port of its gRPC service
    introduction: bytes = b""  # pdserve/introduction.py; good for one life of one puller


class NodeHello(Message, frozen=True):
    """The first message of a node on a stream: who it is and what it has."""

    node_id: str
    incarnation: str
    role: NodeRole
    state: NodeState
    session_address: str
    metrics_address: str
    model_id: str
    revision: str
    layout: KvLayout
    num_blocks: int
    max_model_len: int
    introduction_key: bytes = b""  # coordinators vouch for pullers with it; a secret
    prefill_refusal: str = ""  # why it can never prefill for others; empty: it can


class Welcome(Message, frozen=True):
    """The coordinator's answer to NodeHello."""

    coordinator_id: str
    incarnation: str


class SetRole(Message, frozen=True):
    """Work for this pool from now on; what was begun for the other one is finished."""

    role: NodeRole


class DrainSeen(Message, frozen=True):
    """The node's DRAINING has been seen: no leg follows on this stream."""


class LinkState(Message, frozen=True):
    """How a node pulls from one other."""

    peer: str  # node id
    transport: str
    reason: str  # why this one and no better one


class LoadReport(Message, frozen=True):
    """How a node is doing. Sent on change and as heartbeat."""

    state: NodeState
    role: NodeRole
    loading_progress: float = 1.0  # 0..1, of the weights
    queued_tokens: int = 0  # prompt tokens accepted and not yet computed
    running_requests: int = 0
    waiting_requests: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0  # free, holding reusable prefixes (a part of free_blocks)
    pinned_blocks: int = 0  # held for a handoff that is not settled
    step_time_s: float = 0.0  # moving average
    # Time taken / time predicted of steps with chunks of prompts, and of steps without; 0: no such
    # step has been seen.
    prefill_ratio: float = 0.0
    decode_ratio: float = 0.0
    links: list[LinkState] = []  # open sessions that this node pulls over

    def check(self) -> None:
        """That what came from elsewhere can be true.

        Raises:
            MalformedMessage: it cannot.
        """
        numbers = (
            self.queued_tokens,
            self.running_requests,
            self.waiting_requests,
            self.free_blocks,
            self.cached_blocks,
            self.pinned_blocks,
            self.step_time_s,
            self.prefill_ratio,
            self.decode_ratio,
        )
        if not all(0 <= number < inf for number in numbers):
            raise MalformedMessage(f"LoadReport: neither counts nor times: {self}")


class KvTier(IntEnum):
    """Where on a node a block of KV is."""

    POOL = 1  # where the engine computes
    HOST = 2  # the host tier: copies of blocks, which outlive those in the pool


class KvEvents(Message, frozen=True):
    """Which blocks, named by their hashes, a node can serve; in the order in which it happened.

    After a hello come events for all that is held already.
    """

    tier: KvTier
    stored: list[bytes] = []
    evicted: list[bytes] = []
