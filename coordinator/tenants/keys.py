"""API keys: made from random bits, stored as hashes.

A key has 256 random bits, so one round of SHA-256 protects it well enough; slow hashes are needed
for passwords that people choose.
"""

from __future__ import annotations

import re
from secrets import token_urlsafe

PREFIX = "pds-"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_ID_CHARS = 8  # of a hash: enough to distinguish a tenant's keys, useless for guessing a key


def new_key() -> str:
    """Make a new random key."""
    return PREFIX + token_urlsafe(32)


def is_key_hash(text: str) -> bool:
    """Return whether this text has the form of a result of `hash_key`."""
    return _HASH.fullmatch(text) is not None


def key_id(key_hash: str) -> str:
    """Return a short name of a key, for logs and usage accounts."""
    return key_hash.removeprefix("sha256:")[:_ID_CHARS]
