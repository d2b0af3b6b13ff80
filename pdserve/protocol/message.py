"""The base class of all messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True):
    """Base of every message. Immutable."""
