"""What all messages have in common."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every message: immutable, fields by name."""
