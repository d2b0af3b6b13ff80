"""What the processes say to each other: small, frozen, typed messages.

The wire form of each is the protobuf message of the same name (`proto/pdserve/wire`); the two are
converted in one place, `pdserve/wire/convert.py`, field by field of the same name.

A request runs as *legs*: a prefill leg on a prefill node and a decode leg on a decode node, or one
local leg on a decode node that prefills for itself. Every leg of a request carries the same id.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import msgspec

from pdserve.errors import MalformedMessage
from pdserve.kv_layout import KvLayout
from pdserve.pooling import Pooling


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every message: immutable, fields by name."""


class NodeRole(IntEnum):
    """Which pool a node belongs to."""

    PREFILL = 1
    DECODE = 2


class NodeState(IntEnum):
    """Where a node is in its life; only READY nodes are given new legs."""

    LOADING = 1
    READY = 2
    DRAINING = 3


class FinishReason(IntEnum):
    """Why a sequence ended (the OpenAI words are the coordinator's business)."""

    STOP = 1  # an eos or stop token, or a stop string
    LENGTH = 2


# ---- what a request asks for -------------------------------------------------------------------


class SamplingParams(Message, frozen=True):
    """How tokens are chosen. Sampling is a pure function of these, the logits and the history."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # always set: the coordinator draws one when the client gives none
    max_tokens: int = 16  # 0: the request ends with its prompt, and nothing is sampled
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: int | None = None  # None = none; n = the chosen token's and the n likeliest
    grammar: str = ""  # that the output must match (pdserve/grammar); empty: none
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt's tokens
    pooling: Pooling | None = None  # what the prompt's embedding is made of; None = nothing

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached KV saves computing. What is told of a token itself needs more than KV."""
        return self.prompt_logprobs is None and self.pooling in (None, Pooling.LAST)


class TokenLogprobs(Message, frozen=True):
    """Log-probabilities at one position, from the unmodified distribution of the model."""

    chosen: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    rank: int = 0  # of the chosen token, from 1; 0 = not counted, as it is for prompts alone


class PhaseTimes(Message, frozen=True):
    """Seconds a request spent in each phase on one node; 0 where the node had no such phase."""

    queue_s: float = 0.0  # accepted by the node -> first scheduled
    prefill_s: float = 0.0  # first scheduled -> first token sampled
    transfer_s: float = 0.0  # KV bytes on their way
    handover_s: float = 0.0  # end of the prefill elsewhere -> joined the batch here
    handover_copy_s: float = 0.0  # of it: copying KV
    handover_room_s: float = 0.0  # of it: waiting for room
    handover_step_s: float = 0.0  # of it: complete -> joined; the rest is messages
    decode_s: float = 0.0  # joined the batch -> last token


# ---- coordinator -> node -----------------------------------------------------------------------


class NodeAddress(Message, frozen=True):
    """Where one life of a node exports its KV, and what opens its door to the addressee."""

    node_id: str
    incarnation: str
    session_address: str  # host:port of its gRPC service
    introduction: bytes = b""  # pdserve/introduction.py; good for one life of one puller


class PrefixSource(Message, frozen=True):
    """A hint: this node held the KV of the prompt's first tokens a moment ago."""

    node: NodeAddress
    num_tokens: int


class Slo(Message, frozen=True):
    """What a client was promised. Times are what is left of them as a leg is sent.

    Clocks of two machines differ, durations do not. 0 stands for: nothing was promised.
    """

    name: str = ""  # of its class
    tenant: str = ""  # whose request it is; empty: nobody's in particular
    priority: int = 0  # higher ones go first, and preempt
    weight: float = 1.0  # of its payer
    ttft_s: float = 0.0  # until token 1 is due; negative: it is overdue
    tpot_s: float = 0.0  # for each token from then on
    deadline_s: float = 0.0  # until nobody wants the answer any more

    @property
    def payer(self) -> str:
        """Against whose share it counts: payers of equal priority share nodes by their weights."""
        return f"{self.name}/{self.tenant}" if self.tenant else self.name


class PrefillLeg(Message, frozen=True):
    """Compute the prompt's KV, sample token 1, hold the KV for whoever pulls it."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    handoff: bool = True  # False: one token is all that is wanted, nobody will pull
    prefix_sources: list[PrefixSource] = []  # longest first; pulling from them is up to the node
    slo: Slo = Slo()


class DecodeLeg(Message, frozen=True):
    """Pull the prompt's KV from `source`, then stream tokens from number 2 on.

    Without a `source` the node prefills the prompt itself, and streams from number 1.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    source: NodeAddress | None = None
    prefix_sources: list[PrefixSource] = []  # of a prompt to be prefilled here
    slo: Slo = Slo()


class CancelLeg(Message, frozen=True):
    """Stop whatever runs under this id, free its blocks, say nothing back."""

    request_id: str
    reason: str


class SetRole(Message, frozen=True):
    """Work for this pool from now on; what was begun for the other one is finished."""

    role: NodeRole


class DrainSeen(Message, frozen=True):
    """The node's DRAINING has been seen: no leg follows on this stream."""


class Welcome(Message, frozen=True):
    """The coordinator's answer to NodeHello."""

    coordinator_id: str
    incarnation: str


# ---- node -> coordinator -----------------------------------------------------------------------


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


class StepCosts(Message, frozen=True):
    """What a step of a node's engine costs: `pdserve/perf_model.py`. Times in seconds.

    A step that computes n tokens, m of which are sampled from, takes
    `knots(n) + sampled_s * m + pair_s * prefill pairs + context_s * decode context`.
    """

    knot_tokens: list[int]  # ascending; linear in between, and on beyond the last
    knot_s: list[float]  # of the same length, not descending
    sampled_s: float = 0.0
    pair_s: float = 0.0  # per query and key of chunks of prompts
    context_s: float = 0.0  # per token of context of decoding requests


class TransferCosts(Message, frozen=True):
    """What a pull over one transport costs: `fixed_s + bytes / bytes_per_s`."""

    transport: str
    fixed_s: float
    bytes_per_s: float


class PerfReport(Message, frozen=True):
    """What a node can do. Sent when it is known, and when what it has learned differs much."""

    step: StepCosts
    token_budget: int  # most tokens of a step
    max_batch_size: int  # most requests of a step
    transfers: list[TransferCosts] = []


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


class TokenEvent(Message, frozen=True):
    """New tokens of one request. `index` is the output position of the first of them, from 0."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the eos or stop token that ended the sequence
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; with token 1
    prompt_logprobs: list[TokenLogprobs] = []  # of the prompt from its second token; with token 1
    embedding: bytes = b""  # the mean of its pooled states: float32, little-endian; at its end
    times: PhaseTimes | None = None  # with the node's last event of this request


class TokenBatch(Message, frozen=True):
    """One engine step's tokens for one coordinator: one message per node per step.

    Nearly all tokens of a step are just tokens. They are in columns of equal length, which cost
    next to nothing to pack and to unpack; only those with more to say are events of their own.
    """

    events: list[TokenEvent] = []
    request_ids: list[str] = []  # each has one more token ...
    indices: list[int] = []  # ... at this output position ...
    token_ids: list[int] = []  # ... which is this one

    def each(self) -> Iterator[TokenEvent]:
        """All of them as events.

        Raises:
            MalformedMessage: the columns are not of equal length; before anything else.
        """
        if not len(self.request_ids) == len(self.indices) == len(self.token_ids):
            raise MalformedMessage("TokenBatch: columns of different lengths")
        yield from self.events
        for request_id, index, token_id in zip(
            self.request_ids, self.indices, self.token_ids, strict=True
        ):
            yield TokenEvent(request_id=request_id, index=index, token_ids=[token_id])


class LegFailed(Message, frozen=True):
    """A leg ended in an error; its blocks are free again."""

    request_id: str
    code: str
    message: str


# ---- node <-> node: the session over which KV is handed over ----------------------------------


class TransportOffer(Message, frozen=True):
    """One transport of an exporter: where it is served, or why it is not."""

    name: str
    endpoint: str = ""
    metadata: bytes = b""  # what else the transport needs to connect
    unavailable: str = ""  # why this exporter cannot serve it; empty: it can


class PullerHello(Message, frozen=True):
    """The first message of a puller on a session."""

    node_id: str
    incarnation: str
    exporter_incarnation: str  # the life of the exporter that the puller means
    fingerprint: str
    layout: KvLayout
    introduction: bytes = b""  # by a coordinator of the exporter's


class ExporterWelcome(Message, frozen=True):
    """The exporter's answer: what it is, and how its pool can be read."""

    node_id: str
    incarnation: str
    fingerprint: str
    layout: KvLayout
    num_blocks: int
    memory: str  # "cpu" or "cuda": where the blocks are
    host_id: str  # equal on two nodes exactly when they share a kernel and its memory
    access: bytes  # to the transports, as long as the session lasts; a secret
    offers: list[TransportOffer]


class Subscribe(Message, frozen=True):
    """Tell me about this request's blocks, from the first on; may come before its prefill leg."""

    request_id: str
    subscription_id: str  # unique among the puller's; what is said about the request bears it


class Settle(Message, frozen=True):
    """I need these blocks no more: everything was pulled, or I gave it up."""

    subscription_id: str  # or a query's
    pulled: bool


class Renew(Message, frozen=True):
    """The tickets that I have from this subscription are old: say all once more."""

    subscription_id: str


class PrefixQuery(Message, frozen=True):
    """Which of these blocks, one after the other in a prompt, do you hold? I mean to pull them.

    Answered by a PrefixAnswer; its blocks are held until a Settle of `query_id`, or a lease's end.
    """

    query_id: str  # unique among the puller's
    first_block: int  # of the prompt; in blocks of the exporter's size
    hashes: list[bytes]


class PrefixAnswer(Message, frozen=True):
    """What there is of a PrefixQuery: the first `num_blocks` of its blocks."""

    query_id: str
    num_blocks: int = 0
    ticket: bytes = b""  # for these blocks' tokens in their prompt; empty without any


class Announcement(Message, frozen=True):
    """KV that is complete and may be pulled; the ticket is opaque to all but the exporter.

    Announcements follow each other without a gap: chunk after chunk of the prompt's tokens, and of
    a chunk's layers one range after the other. They go up to the handoff record's.
    """

    request_id: str
    ticket: bytes
    is_restart: bool = False  # said anew from token 0 on: what came before is void
    subscription_id: str = ""  # the session fills it in, here and below


class HandoffRecord(Message, frozen=True):
    """Everything decode needs besides announced KV, sent when the last chunk is computed.

    The penalties' counts and the sampler's state follow from the token history, so they are not
    fields; `num_tokens` is how many prompt tokens have KV.
    """

    request_id: str
    num_tokens: int
    token_ids: list[int]  # output so far: token 1
    logprobs: list[TokenLogprobs] = []
    cached_tokens: int = 0
    prefill_end_s: float = 0.0  # the exporter's CLOCK_MONOTONIC, for measuring on one host
    ticket: bytes = b""  # for the KV that was not announced before; empty: there is none
    subscription_id: str = ""


class HandoffEnded(Message, frozen=True):
    """There is nothing (more) to pull: finished with token 1, failed, or cancelled."""

    request_id: str
    code: str
    message: str
    subscription_id: str = ""
