"""The events of a streamed message."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from coordinator.api.answer.sse import framed
from coordinator.api.messages.errors import FailedCall
from coordinator.api.messages.objects import Block, MadeMessage, MessageUsage, StopReason


class MessageStart(Struct, kw_only=True, tag_field="type", tag="message_start"):
    """The message begins; it is still empty."""

    message: MadeMessage


class Ping(Struct, tag_field="type", tag="ping"):
    """Nothing has happened; the connection is alive."""


class BlockStart(Struct, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block begins; it is still empty."""

    index: int
    content_block: Block


class MoreText(Struct, kw_only=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class MoreThinking(Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More thinking."""

    thinking: str


class Signed(Struct, kw_only=True, tag_field="type", tag="signature_delta"):
    """The signature of the block's thinking, at its end."""

    signature: str


class MoreInput(Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of a call's input, as JSON text."""

    partial_json: str


class BlockDelta(Struct, kw_only=True, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: MoreText | MoreThinking | Signed | MoreInput


class BlockStop(Struct, kw_only=True, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: int


class EndDelta(Struct, kw_only=True):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, kw_only=True, tag_field="type", tag="message_delta"):
    """What is known of the message at its end; token counts are of all of it."""

    delta: EndDelta
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The message has ended."""


MessageEvent = (
    MessageStart
    | Ping
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | FailedCall
)


def encoded(event: MessageEvent) -> bytes:
    """Return an event as sent on the wire."""
    return framed(msgspec.json.encode(event), str(event.__struct_config__.tag))


PING = encoded(Ping())
