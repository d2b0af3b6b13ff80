"""What two nodes say to each other: the session over which KV is handed over."""

from __future__ import annotations

from pdserve.kv_layout import KvLayout
from pdserve.protocol.message import Message
from pdserve.protocol.requests import TokenLogprobs


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
    at_end: bool = False  # all at once, with the handoff record: nothing is pulled before


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
