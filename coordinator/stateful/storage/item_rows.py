"""Items of a conversation that are rows of their own, so that one more is written and not all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.stateful.storage.packed_items import PackedItem

Rows = list[tuple[PackedItem, int]]  # items of a conversation, and the numbers of their rows


@dataclass(frozen=True, slots=True)
class Difference:
    """What is to be done to rows, so that they are a conversation's items."""

    kept: Rows
    gone: list[int]
    new: Sequence[PackedItem]  # behind those that are kept


def difference(rows: Rows, items: Sequence[PackedItem]) -> Difference:
    """Return what became of these rows. An item is the same if it is the same object."""
    before = {id(item): seq for item, seq in rows}
    kept = [(item, seq) for item in items if (seq := before.pop(id(item), None)) is not None]
    if any(item is not had for item, (had, _) in zip(items, kept, strict=False)):
        # Some are new among them: those of an entry of before they were rows.
        return Difference([], [seq for _, seq in rows], items)
    return Difference(kept, list(before.values()), items[len(kept) :])
