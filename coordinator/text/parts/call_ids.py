"""Ids of tool calls in Mistral's form: nine letters and digits. Its templates accept no other."""

from __future__ import annotations

import re
import string
from hashlib import sha256

_CHARS = string.ascii_letters + string.digits
_LENGTH = 9
_ACCEPTED = re.compile(rf"[a-zA-Z0-9]{{{_LENGTH}}}")


def mistral_id(drawn: int) -> str:
    """Return the id for a number."""
    num_chars = len(_CHARS)
    return "".join(_CHARS[drawn // num_chars**place % num_chars] for place in range(_LENGTH))


def as_mistral_id(call_id: str) -> str:
    """Return the id itself if it is in that form, else always the same one for it."""
    if _ACCEPTED.fullmatch(call_id):
        return call_id
    return mistral_id(int.from_bytes(sha256(call_id.encode()).digest()))
