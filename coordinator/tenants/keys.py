"""API keys: made from random bits, kept as hashes.

A key has 256 random bits, so that one round of SHA-256 hides it well enough; slow hashes are for
what people make up.
"""

from __future__ import annotations

import hashlib
import re
from secrets import token_urlsafe

PREFIX = "pds-"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_ID_CHARS = 8  # of a hash: enough to tell a tenant's keys apart, and nothing to guess a key from


def new_key() -> str:
    """A key that nobody has."""
    return PREFIX + token_urlsafe(32)


def hash_key(key: str) -> str:
    """What is kept of a key: "sha256:" and 64 hexadecimal digits."""
    sent = key.encode(errors="surrogateescape")  # in a header, what is no UTF-8 is read as these
    return "sha256:" + hashlib.sha256(sent).hexdigest()


def is_key_hash(text: str) -> bool:
    """Whether this is what `hash_key` gives."""
    return _HASH.fullmatch(text) is not None


def key_id(key_hash: str) -> str:
    """A short name of a key, for logs and accounts."""
    return key_hash.removeprefix("sha256:")[:_ID_CHARS]
