"""Entries in bounded memory, with a fair share of it for each owner."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from coordinator.stateful.storage.stored import Stored


class _Shelf:
    """The stored entries of one owner."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[str, Stored] = OrderedDict()  # least recently used first
        self.num_bytes = 0
        self._bytes_of: dict[str, int] = {}  # id |-> size when last counted

    def add(self, stored: Stored) -> None:
        """Add a new entry, or update one that has changed."""
        self.by_id[stored.id] = stored
        self.by_id.move_to_end(stored.id)
        self.num_bytes += stored.num_bytes - self._bytes_of.get(stored.id, 0)
        self._bytes_of[stored.id] = stored.num_bytes

    def remove(self, stored_id: str) -> Stored:
        self.num_bytes -= self._bytes_of.pop(stored_id)
        return self.by_id.pop(stored_id)


class Shelves:
    """The stored entries of all owners.

    When they are full, the owner with the largest share loses its least recently used entry.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}  # owner |-> its entries, at least one

    def __len__(self) -> int:
        return sum(len(shelf.by_id) for shelf in self._shelves.values())

    def __iter__(self) -> Iterator[Stored]:
        for shelf in self._shelves.values():
            yield from shelf.by_id.values()

    def find(self, owner: str, stored_id: str) -> Stored | None:
        """Return an entry of this owner, and mark it as recently used."""
        shelf = self._shelves.get(owner)
        if shelf is None or stored_id not in shelf.by_id:
            return None
        shelf.by_id.move_to_end(stored_id)
        return shelf.by_id[stored_id]

    def add(self, stored: Stored) -> list[Stored]:
        """Take a new or a changed entry in; returns those for which there is no more room."""
        self._shelves.setdefault(stored.owner, _Shelf()).add(stored)
        evicted = []
        while len(self) > self._max_entries or self.num_bytes > self._max_bytes:
            owner = max(self._shelves, key=self._part_of)
            evicted.append(self.remove(owner, next(iter(self._shelves[owner].by_id))))
        return evicted

    def remove(self, owner: str, stored_id: str) -> Stored:
        """Remove an entry that is there, and return it."""
        shelf = self._shelves[owner]
        removed = shelf.remove(stored_id)
        if not shelf.by_id:
            del self._shelves[owner]
        return removed

    @property
    def num_bytes(self) -> int:
        """What all entries take, as they were last counted."""
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def _part_of(self, owner: str) -> float:
        """Return the owner's share of the store, by number or by bytes, whichever is larger."""
        shelf = self._shelves[owner]
        return max(len(shelf.by_id) / self._max_entries, shelf.num_bytes / self._max_bytes)
