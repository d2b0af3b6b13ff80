"""Which blocks leave a prefix store that is full: those worth least of who has most.

A block's worth is its stamp. Written, it has that time. Read again, it has a later one, by a share
of the time that the store reaches back: what was wanted once is wanted again sooner than what never
was. The first blocks of a prompt have later stamps than those that are useless without them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kv_transfer.store.blobs import Blob
from kv_transfer.store.entry import Key

KEPT: Final = 15 / 16  # of its bytes has a store that was full, so that there is room for a while
HEAD_START: Final = 0.25  # of the time that the store reaches back, for what is read
_STEP_S: Final = 1e-3  # between the stamps of two blocks of a prompt


@dataclass(slots=True)
class Content:
    """What is in a store, by owner."""

    by_owner: dict[str, list[Blob]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, blobs: Iterable[Blob]) -> Content:
        """Return what these blobs are; what is no block is left out."""
        content = cls()
        for blob in blobs:
            if (key := Key.of(blob.name)) is not None:
                content.by_owner[key.owner].append(blob)
        return content

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return sum(map(_bytes, self.by_owner.values()))

    @property
    def reach_s(self) -> float:
        """Between the oldest and the newest stamp."""
        stamps = [blob.stamp_s for blobs in self.by_owner.values() for blob in blobs]
        return max(stamps) - min(stamps) if stamps else 0.0


def stamp_of_use(now_s: float, reach_s: float, index: int) -> float:
    """Return the stamp of a block that is read, the block `index` of its prompt."""
    return now_s + HEAD_START * reach_s - _STEP_S * index


def victims(content: Content, most_bytes: int, quota: int) -> list[Blob]:
    """Return what has to leave for the store to have at most so many bytes, and each owner `quota`.

    A store over its bound is brought to a little below it, by owners with more than the others:
    each keeps at least what it would have if all had equally much.
    """
    has = {owner: _bytes(blobs) for owner, blobs in content.by_owner.items()}
    allowed = {owner: min(num_bytes, quota) for owner, num_bytes in has.items()}
    if sum(allowed.values()) > most_bytes:
        level = _level(sorted(allowed.values()), int(most_bytes * KEPT))
        allowed = {owner: min(num_bytes, level) for owner, num_bytes in allowed.items()}
    leaving = []
    for owner, blobs in content.by_owner.items():
        excess = has[owner] - allowed[owner]
        for blob in sorted(blobs, key=lambda blob: (blob.stamp_s, blob.name)):
            if excess <= 0:
                break
            excess -= blob.num_bytes
            leaving.append(blob)
    return leaving


def _level(amounts: Sequence[int], total: int) -> int:
    """The most that each may have of what they have, ascending, for all to have `total`."""
    left = total
    for number, amount in enumerate(amounts):
        share = left // (len(amounts) - number)
        if amount > share:
            return share
        left -= amount
    return max(amounts, default=0)


def _bytes(blobs: Iterable[Blob]) -> int:
    return sum(blob.num_bytes for blob in blobs)
