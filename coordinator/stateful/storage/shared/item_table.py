"""Rows of items in the tables: what is new of a conversation is written, and read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from coordinator.stateful.storage.backing import Key
from coordinator.stateful.storage.item_rows import Rows, difference
from coordinator.stateful.storage.packed_items import PackedItem, items_bytes, packed_before
from coordinator.stateful.storage.shared import tables
from coordinator.stateful.storage.stored import StoredConversation

if TYPE_CHECKING:
    from coordinator.stateful.storage.shared.link import Connection


def last_of(rows: Rows) -> int:
    """Return the number of the last row that is known; further ones are larger."""
    return rows[-1][1] if rows else 0


def rows_now(known: Rows, seqs: Iterable[int], new: Iterable[bytes]) -> Rows:
    """Return all rows, of which `new` are behind those known; these keep their objects."""
    had = {seq: item for item, seq in known}
    coming = iter(new)
    return [(had.get(seq) or packed_before(next(coming)), seq) for seq in seqs]


def give_items(talk: StoredConversation, rows: Rows) -> None:
    """Give a conversation its items, unless its entry is of before they were rows."""
    if rows:
        talk.items = [item for item, _ in rows]
        talk.items_bytes = items_bytes(talk.items)


async def read_items(connection: Connection, key: Key, known: Rows) -> Rows:
    """Return the rows as they are now. Raises StoreUnavailable."""
    found = await connection.fetch(tables.ITEMS, *key, last_of(known))
    return rows_now(known, [seq for seq, _ in found], [item for _, item in found if item])


async def write_items(
    connection: Connection, key: Key, known: Rows, items: Sequence[PackedItem]
) -> Rows:
    """Have these rows become these items; return the rows. Raises StoreUnavailable."""
    todo = difference(known, items)
    if todo.gone:
        await connection.execute(tables.DELETE_ITEMS, *key, todo.gone)
    if not todo.new:
        return todo.kept
    packed = [item.packed for item in todo.new]
    added = await connection.fetch(tables.ADD_ITEMS, *key, packed)
    return [*todo.kept, *zip(todo.new, (seq for (seq,) in added), strict=True)]
