"""Surveys of the prefix store: what it has, what has to leave, and who has been erased.

Every node surveys, and no lock says whose turn it is: two that do it at once find the same blocks
to be worth least, and whoever comes second finds them gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from kv_transfer.store.blobs import Blob, Blobs
from kv_transfer.store.entry import Key
from kv_transfer.store.erasure import marks
from kv_transfer.store.eviction import Content, victims

MOST_KNOWN: Final = 1 << 20  # blocks of one kind that a node knows of: 110 MB


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a store, in bytes."""

    size: int  # 0: as the store says
    quota: int  # of one owner; 0: none


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found."""

    keys: list[Key]  # of one kind
    marks: dict[str, float]
    reach_s: float
    num_bytes: int  # of all blocks
    most_bytes: int
    num_evicted: int


def survey(blobs: Blobs, kind: str, limits: Limits) -> Survey:
    """Look through the store, and remove what is too much. Blocks, in a thread. Raises OSError."""
    content = Content.of(blobs.blobs())
    present = content.num_bytes
    most = limits.size or blobs.most_bytes(present)
    leaving = victims(content, most, limits.quota or most)
    for blob in leaving:
        blobs.remove(blob.name)
    gone = {blob.name for blob in leaving}
    kept = [b for found in content.by_owner.values() for b in found if b.name not in gone]
    return Survey(
        keys=_keys(kept, kind),
        marks=marks(blobs),
        reach_s=content.reach_s,
        num_bytes=sum(blob.num_bytes for blob in kept),
        most_bytes=most,
        num_evicted=len(leaving),
    )


def use_all(blobs: Blobs, stamps: Mapping[str, float]) -> None:
    """Stamp these names. Blocks, in a thread. Raises OSError."""
    for name, stamp_s in stamps.items():
        blobs.use(name, stamp_s)


def _keys(blobs: list[Blob], kind: str) -> list[Key]:
    """Those of one kind; the newest ones, if they are very many."""
    newest = sorted(blobs, key=attrgetter("stamp_s"), reverse=True)
    keys = [key for blob in newest if (key := Key.of(blob.name)) and key.kind == kind]
    return keys[:MOST_KNOWN]
