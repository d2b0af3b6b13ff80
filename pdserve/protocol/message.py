"""The base classes of all messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True):
    """Base of every message. Immutable."""


class Inline(msgspec.Struct, frozen=True):
    """Base of values that several messages have, and that is none itself.

    On the wire its fields stand among those of the message.
    """
