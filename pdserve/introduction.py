"""How a coordinator vouches for one node to another.

A node tells its coordinators a key that is good for its present life. To send a puller there, the
coordinator seals both incarnations with it; the exporter opens sessions for no one else. So who did
not come through a coordinator finds every door closed, and an introduction ends with either life.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from pdserve.errors import MalformedMessage

KEY_BYTES = 32
INTRODUCTION_BYTES = 32


def new_key() -> bytes:
    """A fresh key for one life of a node. A secret: never logged or shown."""
    return secrets.token_bytes(KEY_BYTES)


def check_key(key: bytes) -> None:
    """That what came from a node can be its key.

    Raises:
        MalformedMessage: it has another length.
    """
    if len(key) != KEY_BYTES:
        raise MalformedMessage(f"an introduction key has {KEY_BYTES} bytes, this has {len(key)}")


def introduce(key: bytes, exporter_incarnation: str, puller_incarnation: str) -> bytes:
    """What this life of a puller shows to that life of an exporter, whose key it is."""
    # The length keeps ("a", "bc") and ("ab", "c") apart.
    text = f"{len(exporter_incarnation)}:{exporter_incarnation}{puller_incarnation}"
    return hashlib.blake2b(text.encode(), digest_size=INTRODUCTION_BYTES, key=key).digest()


def is_introduced(
    key: bytes, exporter_incarnation: str, puller_incarnation: str, shown: bytes
) -> bool:
    """Whether a coordinator that knows the key has vouched for this puller."""
    return hmac.compare_digest(introduce(key, exporter_incarnation, puller_incarnation), shown)
