"""What a node and the agent of one of its later hosts say to each other.

A call has a number, and is answered once; so is one that was cancelled. Arrays of block ids are
int64, generations are uint64.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pdserve.kv import KvLayout
from pdserve.protocol import ExporterWelcome, TransportOffer


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A call, the first one: what the agent is a part of. Answered by Serves."""

    call: int
    node_id: str
    incarnation: str
    model_id: str
    revision: str
    layout: KvLayout  # of all parts together
    num_stages: int
    windows: tuple[int | None, ...]  # of the model's layers, in tokens; (): none has one
    ticket_key: bytes  # a secret
    now_s: float  # the node's clock
    transports: list[str]  # as the setting
    kv_port: int  # likewise
    links: list[str]  # likewise, of simulated links
    tier_blocks: int  # slots of the host tier; 0: there is none


class Serves(msgspec.Struct, frozen=True):
    """Answers Begin: how pullers reach the parts here."""

    offers: list[TransportOffer]


class Bumped(msgspec.Struct, frozen=True, tag=True):
    """No call: blocks have these generations from now on, before anything is written to them."""

    block_ids: bytes
    generations: bytes


class AdmitPuller(msgspec.Struct, frozen=True, tag=True):
    """A call: a session has begun, whose puller shows this token."""

    call: int
    token: bytes


class Dismiss(msgspec.Struct, frozen=True, tag=True):
    """No call: it has ended."""

    token: bytes


class Connect(msgspec.Struct, frozen=True, tag=True):
    """A call: prepare to pull from an exporter. Answered by Connected."""

    call: int
    link: int  # what the link is called from now on
    welcome: ExporterWelcome
    timeout_s: float


class Connected(msgspec.Struct, frozen=True):
    """Answers Connect."""

    transport: str
    reason: str  # as Link.reason


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    """A call: close a link, and end what is pulled over it."""

    call: int
    link: int


class Pull(msgspec.Struct, frozen=True, tag=True):
    """A call: as Puller.pull, into the parts here. Answered by Pulled."""

    call: int
    link: int
    ticket: bytes
    block_table: bytes
    from_token: int
    timeout_s: float
    num_tokens: int | None


class Pulled(msgspec.Struct, frozen=True):
    """Answers Pull."""

    num_bytes: int
    read_s: float


class Store(msgspec.Struct, frozen=True, tag=True):
    """A call: copy blocks to slots of the host tier."""

    call: int
    block_ids: bytes
    slots: bytes


class LoadBlocks(msgspec.Struct, frozen=True, tag=True):
    """A call: copy slots of the host tier to blocks."""

    call: int
    slots: bytes
    block_ids: bytes


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """No call: end that one, which is answered when nothing of it touches memory any more."""

    call: int


class Answer(msgspec.Struct, frozen=True):
    """Of an agent, to a call."""

    call: int
    result: bytes = b""  # a message in msgpack, if one is due
    code: str = ""  # of an error
    message: str = ""


Call: TypeAlias = Begin | AdmitPuller | Connect | Disconnect | Pull | Store | LoadBlocks
Said: TypeAlias = Call | Bumped | Dismiss | Cancel
