"""What all messages have in common."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True):
    """Base of every message: immutable."""
