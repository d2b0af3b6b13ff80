"""Signatures of thinking, which clients send back with it, unread.

Nothing here depends on where thinking comes from, so every signature is accepted. Of thinking that
is not shown, the signature is what the client keeps: the text itself, which it is no secret from.
"""

from __future__ import annotations

import base64
import binascii
from hashlib import blake2b

_SEALED = "sealed:"


def signature(thinking: str, *, is_shown: bool) -> str:
    """Return the signature of a block of thinking."""
    if not is_shown:
        return _SEALED + base64.b64encode(thinking.encode()).decode()
    return blake2b(thinking.encode(), digest_size=32).hexdigest()


def thought_of(thinking: str, signed: str) -> str:
    """Return the text of a block that a client sends back: "" if another server has sealed it."""
    if thinking or not signed.startswith(_SEALED):
        return thinking
    try:
        return base64.b64decode(signed.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
