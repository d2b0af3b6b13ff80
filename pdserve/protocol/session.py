"""The messages of a session between two nodes, over which requests are handed off."""

from __future__ import annotations

from pdserve.kv import KvLayout
from pdserve.protocol.message import Message
from pdserve.protocol.requests import TokenLogprobs


class TransportOffer(Message, frozen=True):
    """One transport of an exporter: its address, or why it is not available."""

    name: str
    endpoint: str = ""
    metadata: bytes = b""  # anything else that the transport needs to connect
    unavailable: str = ""  # why the exporter cannot serve it; empty: it can
    part: int = 0  # of the exporter's pool, if each rank has one: 64 * its stage + rank in that
    host_id: str = ""  # as that of the welcome, where the part is on another host of the node
    codecs: list[str] = []  # with which the exporter may send KV; none from older builds


class PullerHello(Message, frozen=True):
    """The first message of a puller on a session."""

    node_id: str
    incarnation: str
    exporter_incarnation: str  # the exporter's incarnation that the puller was sent to
    fingerprint: str
    layout: KvLayout
    introduction: bytes = b""  # by one of the exporter's coordinators
    protocol: int = 0  # see version.py; 0: older than this field


class ExporterWelcome(Message, frozen=True):
    """The exporter's answer: its identity, and how its pool can be read."""

    node_id: str
    incarnation: str
    fingerprint: str
    layout: KvLayout
    num_blocks: int
    memory: str  # where the blocks are: "cpu", "cuda" or "private"
    host_id: str  # equal for two nodes if and only if they can share memory
    access: bytes  # token for the transports, valid as long as the session; a secret
    offers: list[TransportOffer]
    protocol: int = 0  # see version.py; 0: older than this field
    answers_pings: bool = False  # False also for builds from before there were any


class Ping(Message, frozen=True):
    """Asks the exporter for a sign of life, for it may have nothing to tell for long."""


class Pong(Message, frozen=True):
    """Answers a Ping."""


class Subscribe(Message, frozen=True):
    """Subscribe to a request's KV, from its first block on. May arrive before its prefill leg.

    With `num_emitted` it is a stream that runs on the exporter: its complete blocks are announced,
    then an announcement without a ticket, and the rest after `TakeOver`.
    """

    request_id: str
    subscription_id: str  # unique for the puller; repeated in every answer
    at_end: bool = False  # announce everything at the end, together with the handoff record
    num_emitted: int = 0  # output tokens that the puller knows; 0: the request is a prefill
    taker: str = ""  # the puller's leg that takes a stream over; empty also from older builds


class Settle(Message, frozen=True):
    """The puller does not need these blocks any more: it has pulled everything, or given up."""

    subscription_id: str  # or the id of a query
    pulled: bool


class Renew(Message, frozen=True):
    """The tickets of this subscription may have expired: announce everything again."""

    subscription_id: str


class TakeOver(Message, frozen=True):
    """Everything announced of a stream has been pulled: end it with its next token.

    Answered with its record; if it has completed further blocks, first with their announcement.
    """

    subscription_id: str


class PrefixQuery(Message, frozen=True):
    """Ask for consecutive blocks of a prompt, by hash, in order to pull them.

    Answered by a PrefixAnswer. Its blocks are held until a Settle of `query_id`, or until their
    lease ends.
    """

    query_id: str  # unique for the puller
    first_block: int  # index in the prompt of the first one, in blocks of the exporter's size
    hashes: list[bytes]


class PrefixAnswer(Message, frozen=True):
    """Which blocks of a PrefixQuery can be pulled: the first `num_blocks`."""

    query_id: str
    num_blocks: int = 0
    ticket: bytes = b""  # for the tokens of these blocks; empty if there are none


class Announcement(Message, frozen=True):
    """KV that is complete and can be pulled with this ticket.

    Announcements have no gaps: they cover the prompt chunk by chunk, and a chunk either in one
    piece or as ascending ranges of layers. The handoff record covers the rest.
    """

    request_id: str
    ticket: bytes  # empty: this is all that a stream has completed so far
    is_restart: bool = False  # begins again at token 0; earlier announcements are void
    subscription_id: str = ""  # filled in by the session, here and below


class HeadRow(Message, frozen=True):
    """What a head goes on from to draft a stream's next tokens: rows of the model, of one token.

    Of use to a node with the same head. Others ignore it, and nodes without one send none.
    """

    head: str  # its kind, the version of what is in `row`, and its weights
    row: bytes  # float32, little-endian


class HandoffRecord(Message, frozen=True):
    """Everything that decode needs besides the announced KV. Sent when the request ends there.

    Penalty counts and the sampler's state are not included: they follow from the tokens.
    """

    request_id: str
    num_tokens: int  # with KV: all but the last one
    token_ids: list[int]  # output that the puller does not know: token 1, or a stream's newest ones
    logprobs: list[TokenLogprobs] = []
    cached_tokens: int = 0
    prefill_end_s: float = 0.0  # exporter's CLOCK_MONOTONIC; comparable on one host only
    ticket: bytes = b""  # for the KV that was not announced before; empty: none
    subscription_id: str = ""
    made_s: float = 0.0  # when the record was made, on the same clock
    written_s: float = 0.0  # when it was written to the session; 0: not yet
    adapter: str = ""  # that has computed the KV: the puller's leg has the same
    head: HeadRow | None = None  # of the last token with KV
    # Where prefill and decode nodes have weights of their own: how many of the first tokens have KV
    # that those of prefill nodes have made; the others' are of decode nodes. None: all have the
    # same.
    num_by_prefill: int | None = None
    state_ticket: bytes = b""  # for the blocks of its state, as tokens from 0 on; empty: none


class HandoffEnded(Message, frozen=True):
    """Nothing more can be pulled: the request ended with token 1, failed, or was cancelled."""

    request_id: str
    code: str
    message: str
    subscription_id: str = ""
