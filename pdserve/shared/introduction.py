"""How a coordinator vouches for one node to another.

A node tells its coordinators a key, which is valid for its current incarnation. Before a
coordinator sends a puller to it, it computes a MAC of both incarnations under that key; the
exporter opens sessions only for pullers that present one. So a process that no coordinator sent
can open no session, and an introduction ends when either process does.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from functools import lru_cache
from typing import Final

from pdserve.shared.errors import MalformedMessage

KEY_BYTES = 32
INTRODUCTION_BYTES = 32
MOST_KNOWN: Final = 1 << 12  # pairs of incarnations that were introduced lately


def new_key() -> bytes:
    """A fresh key for one incarnation of a node. A secret: never logged or shown."""
    return secrets.token_bytes(KEY_BYTES)


def check_key(key: bytes) -> None:
    """Check the length of a key that a node has sent.

    Raises:
        MalformedMessage: the length is wrong.
    """
    if len(key) != KEY_BYTES:
        raise MalformedMessage(f"an introduction key has {KEY_BYTES} bytes, this has {len(key)}")


@lru_cache(MOST_KNOWN)
def introduce(key: bytes, exporter_incarnation: str, puller_incarnation: str) -> bytes:
    """What a puller presents to the exporter that has this key, as one incarnation to another."""
    # The length keeps ("a", "bc") and ("ab", "c") apart.
    text = f"{len(exporter_incarnation)}:{exporter_incarnation}{puller_incarnation}"
    return hashlib.blake2b(text.encode(), digest_size=INTRODUCTION_BYTES, key=key).digest()


def is_introduced(
    key: bytes, exporter_incarnation: str, puller_incarnation: str, shown: bytes
) -> bool:
    """Whether `shown` proves that a coordinator with the key has sent this puller."""
    return hmac.compare_digest(introduce(key, exporter_incarnation, puller_incarnation), shown)
