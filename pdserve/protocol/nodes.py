"""The identity, state, load and costs of a node."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from itertools import pairwise
from math import inf

from pdserve.kv import KvLayout
from pdserve.protocol.message import Message
from pdserve.shared.errors import MalformedMessage

_MOST_ROWS = 1 << 20  # of a step; predictions for a node are tabulated up to its own limit


class StepCosts(Message, frozen=True):
    """What a step of a node's engine costs, in seconds; see `pdserve/measured/perf_model.py`.

    A step that computes n tokens and samples after m of them takes
    `knots(n) + sampled_s * m + pair_s * prefill pairs + context_s * decode context`.
    """

    knot_tokens: list[int]  # ascending; linear in between, and beyond the last
    knot_s: list[float]  # same length, not descending
    sampled_s: float = 0.0
    pair_s: float = 0.0  # per query-key pair of prompt chunks
    context_s: float = 0.0  # per context token of decoding requests


class TransferCosts(Message, frozen=True):
    """What a pull over one transport costs: `fixed_s + bytes / bytes_per_s`."""

    transport: str
    fixed_s: float
    bytes_per_s: float


class PerfReport(Message, frozen=True):
    """What a node's steps and pulls cost. Sent once measured, and again after large changes."""

    step: StepCosts
    token_budget: int  # most tokens of a step
    max_batch_size: int  # most requests of a step
    transfers: list[TransferCosts] = []

    def check(self) -> None:
        """Check a report that a node has sent.

        Raises:
            MalformedMessage: a limit or a cost is impossible.
        """
        if not all(0 < size <= _MOST_ROWS for size in (self.token_budget, self.max_batch_size)):
            raise MalformedMessage(
                f"PerfReport: token_budget {self.token_budget} and max_batch_size "
                f"{self.max_batch_size} must be from 1 to {_MOST_ROWS}"
            )
        step = self.step
        knots = step.knot_tokens
        is_line = (
            knots and len(knots) == len(step.knot_s) and all(a < b for a, b in pairwise(knots))
        )
        if not (is_line and knots[0] > 0):
            raise MalformedMessage(
                f"PerfReport: the knots must be positive and rise, each with a time: {step}"
            )
        above_0 = [*step.knot_s, *(costs.bytes_per_s for costs in self.transfers)]
        others = [step.sampled_s, step.pair_s, step.context_s]
        others += [costs.fixed_s for costs in self.transfers]
        if not (all(0 < x < inf for x in above_0) and all(0 <= x < inf for x in others)):
            raise MalformedMessage(
                f"PerfReport: costs must be finite, and times of steps and speeds above 0: {self}"
            )


class NodeRole(IntEnum):
    """Which pool a node belongs to."""

    PREFILL = 1
    DECODE = 2

    @property
    def other(self) -> NodeRole:
        """The other pool."""
        return NodeRole.DECODE if self is NodeRole.PREFILL else NodeRole.PREFILL


class NodeState(IntEnum):
    """Where a node is in its life. Only READY nodes are given new legs."""

    LOADING = 1
    READY = 2
    DRAINING = 3
    SICK = 4  # it cannot compute any more: its legs are lost, and it is about to end itself


class Sickness(StrEnum):
    """What kinds of reasons a node has for being SICK."""

    ENGINE_DEAD = "engine_dead"  # its loop or its thread has ended
    ENGINE_STUCK = "engine_stuck"  # a step takes many times as long as predicted
    STEPS_FAIL = "steps_fail"  # several in a row, through no request's fault
    RANK_LOST = "rank_lost"  # one of the processes that compute its steps together has ended
    DEVICE_FAULT = "device_fault"  # nothing can be computed on the device any more

    @classmethod
    def of(cls, reason: str) -> Sickness | None:
        """The kind of a LoadReport's reason; None if it is unknown here, or there is none."""
        kind = reason.partition(":")[0]
        return next((known for known in cls if known == kind), None)


class NodeAddress(Message, frozen=True):
    """Where one incarnation of a node exports its KV, and what admits the addressee there."""

    node_id: str
    incarnation: str
    session_address: str  # host:port of its gRPC service
    introduction: bytes = b""  # shared/introduction.py; valid for one incarnation of one puller


class TransportReach(Message, frozen=True):
    """Which nodes one transport of a node reaches: those that have it in the same domain."""

    name: str
    domain: str = ""  # a host, for example; empty: the domain of all nodes


class NodeHello(Message, frozen=True):
    """The first message of a node on a stream: its identity and capacity."""

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
    introduction_key: bytes = b""  # with which coordinators vouch for pullers; a secret
    prefill_refusal: str = ""  # why the node can never be a prefill node; empty: it can
    transports: list[TransportReach] = []  # over which its KV can move, to it and from it
    attached_to: list[str] = []  # incarnations of coordinators, over other streams
    program_version: str = ""  # of pdserve; empty: older than this field
    protocol: int = 0  # see version.py; 0: older than this field
    late_last: bool = False  # prompts that can no longer be in time are computed after all others
    short_len: int = 0  # tokens of the longest request that is not long (`Prompt.is_long`); 0: any
    weights: str = ""  # what they are stored, packed and computed with as, for people
    model_name: str = ""  # in the file of models that it read; empty: it read none
    may_become: list[str] = []  # other models of that file, as a node of which it could go on
    # What its steps depend on, where prefill and decode nodes have weights of their own: it stays
    # in its pool then. Empty: as the revision says.
    arithmetic: str = ""
    place_of: str = ""  # the node whose cores and memory it shares with other models; empty: none
    has_woken: bool = False  # its process was a node of another model before
    refused: str = ""  # the model that it was to become instead of this one, and could not

    def refusal(self, role: NodeRole) -> str:
        """Why the node can never work for a pool; empty: it can."""
        if role is NodeRole.PREFILL and self.prefill_refusal:
            return self.prefill_refusal
        if self.arithmetic and role is not self.role:
            return f"it has the weights of {self.role.name.lower()} nodes, and others have others"
        return ""


class Welcome(Message, frozen=True):
    """The coordinator's answer to NodeHello."""

    coordinator_id: str
    incarnation: str
    protocol: int = 0  # see version.py; 0: older than this field


class SetRole(Message, frozen=True):
    """Change to this pool; legs in progress are finished. A node on standby begins to serve."""

    role: NodeRole


class Drain(Message, frozen=True):
    """Finish what runs and end, as after SIGTERM; or go on as a node of another model."""

    become: str = ""  # one of its hello's `may_become`; empty: it ends


class DrainSeen(Message, frozen=True):
    """Acknowledges a report of DRAINING: no further leg follows on this stream."""


class LinkState(Message, frozen=True):
    """How a node pulls from another one."""

    peer: str  # node id
    transport: str
    reason: str  # why not a better one
    codec: str = ""  # "raw", or a codec and its gain; empty from older builds


class DraftState(Message, frozen=True):
    """What has come of the tokens that one source has guessed on a node, since it started."""

    source: str
    drafted: int
    accepted: int  # of these, right
    kv_bytes: int = 0  # part of the node's kv_memory that it has; 0: it computes nothing
    used_kv_bytes: int = 0  # of these, what streams have


class LoadReport(Message, frozen=True):
    """The load of a node. Sent periodically as a heartbeat, and at once on important changes."""

    state: NodeState
    role: NodeRole
    loading_progress: float = 1.0  # share of the weights that is loaded, 0..1
    queued_tokens: int = 0  # accepted prompt tokens that are not computed yet
    running_requests: int = 0
    waiting_requests: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0  # those of free_blocks that hold a reusable prefix
    pinned_blocks: int = 0  # held for a handoff that is not settled
    step_time_s: float = 0.0  # moving average
    # Actual / profiled time of steps with prompt chunks, and of steps without; 0: none seen yet.
    prefill_ratio: float = 0.0
    decode_ratio: float = 0.0
    links: list[LinkState] = []  # open sessions over which this node pulls
    reason: str = ""  # why the node is SICK: a `Sickness`, a colon, and what happened
    num_coordinators: int = 1  # to which the node is attached
    leader: str = ""  # incarnation of that one of them which may do what only one may do
    sent_at: float = 0.0  # by the node's clock, seconds since 1970; 0: not told
    loop_lag_s: float = 0.0  # longest lag of the node's event loop in the last minute
    certificate_ends_at: float = 0.0  # seconds since 1970; 0: it has none, or cannot tell
    # Of the last seconds, in which it computed steps, and in which chunks of prompts; steps side by
    # side count as the shares of the node's cores that they had.
    busy_share: float = 0.0
    prompt_share: float = 0.0
    is_standby: bool = False  # it is LOADING no more, but waits to be given a pool: see SetRole
    drafts: list[DraftState] = []  # by source
    no_drafts: str = ""  # why its steps compute one token of a stream; empty: they may do several
    lacks_memory: bool = False  # it is LOADING, and other models of its node keep what that takes

    def check(self) -> None:
        """Check a report that a node has sent.

        Raises:
            MalformedMessage: a number is negative, infinite or NaN.
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
            self.num_coordinators,
            self.sent_at,
            self.loop_lag_s,
            self.certificate_ends_at,
            self.busy_share,
            self.prompt_share,
            *(number for one in self.drafts for number in (one.drafted, one.accepted)),
            *(number for one in self.drafts for number in (one.kv_bytes, one.used_kv_bytes)),
        )
        if not all(0 <= number < inf for number in numbers):
            raise MalformedMessage(f"LoadReport: numbers must be finite and not negative: {self}")


class KvTier(IntEnum):
    """Where on a node a KV block is."""

    POOL = 1  # the pool that the engine computes with
    HOST = 2  # the host tier: copies that outlive the blocks in the pool


class KvEvents(Message, frozen=True):
    """Prefix blocks, by hash, that a node can serve from now on, or no longer can.

    After a hello, the node first sends all blocks that it holds, then every change in order.
    """

    tier: KvTier
    stored: list[bytes] = []
    evicted: list[bytes] = []
