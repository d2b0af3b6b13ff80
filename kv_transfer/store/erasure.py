"""How all that belongs to one tenant, or group of tenants, leaves a prefix store for good.

A mark stays. Nodes that find it changed forget which blocks of that owner they have, so none that
was computed before is written again; those computed later are.
"""

from __future__ import annotations

import numpy as np

from kv_transfer.store.blobs import Blobs
from kv_transfer.store.entry import owner_name

_MARKS = "erased"


def erase(blobs: Blobs, owner: str) -> int:
    """Remove all blocks of an owner; return how many there were.

    Raises:
        OSError: the store does not do it; some may have been removed.
    """
    name = owner_name(owner)
    blobs.write(_mark(name), np.zeros(1, dtype=np.uint8))
    found = [blob.name for blob in blobs.blobs(name)]
    for blob in found:
        blobs.remove(blob)
    return len(found)


def mark_of(blobs: Blobs, owner: str) -> float | None:
    """Return when this owner, by its name in the store, was erased last. Raises OSError."""
    return blobs.stamp(_mark(owner))


def marks(blobs: Blobs) -> dict[str, float]:
    """Return when each owner was erased that has been. Raises OSError."""
    return {blob.name.removeprefix(f"{_MARKS}/"): blob.stamp_s for blob in blobs.blobs(_MARKS)}


def _mark(owner: str) -> str:
    return f"{_MARKS}/{owner}"
