"""Answers that clients may fetch again, or go on from. In memory: none survives the coordinator."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass

from coordinator.api.responses_api.objects import KeptItem
from pdserve.errors import ResponseNotFound

RESPONSE_ID = "resp_{}"
ITEM_ID = re.compile(r"[a-z]+_(?P<unique>[0-9a-f]{32})_\w+")  # made from the same as its response's


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One of them."""

    id: str
    owner: str  # the tenant whose call it was: nobody else gets to see it
    body: bytes  # the response as JSON
    items: tuple[KeptItem, ...]  # the conversation up to its end, without instructions
    num_input_items: int  # of which so many were there before it began
    items_bytes: int  # counted as if no other response shared them

    @property
    def num_bytes(self) -> int:
        """Roughly what it takes."""
        return len(self.body) + self.items_bytes


class _Shelf:
    """What one owner has in the store."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[str, StoredResponse] = OrderedDict()  # the next to go first
        self.num_bytes = 0

    def add(self, stored: StoredResponse) -> None:
        self.by_id[stored.id] = stored
        self.num_bytes += stored.num_bytes

    def remove(self, response_id: str) -> None:
        self.num_bytes -= self.by_id.pop(response_id).num_bytes


class ResponseStore:
    """When there are too many, or too large ones, whoever has most of the room gives way: of its
    responses, the one that was used least recently. So nobody can push out another's that hold less
    than an even part."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}  # by owner; none is empty

    def __len__(self) -> int:
        return sum(len(shelf.by_id) for shelf in self._shelves.values())

    def put(self, stored: StoredResponse) -> None:
        """Keep a new one; one that is larger than the whole store is not kept."""
        if stored.num_bytes > self._max_bytes:
            return
        self._shelves.setdefault(stored.owner, _Shelf()).add(stored)
        while len(self) > self._max_responses or self._num_bytes > self._max_bytes:
            owner = max(self._shelves, key=self._part_of)
            self._remove(owner, next(iter(self._shelves[owner].by_id)))

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """Raises ResponseNotFound, which names the parameter."""
        stored = self._found(response_id, owner)
        if stored is None:
            raise ResponseNotFound(
                f"there is no response {response_id[:128]!r} here, or no longer", param
            )
        return stored

    def find_item(self, item_id: str, owner: str) -> KeptItem | None:
        """One that a kept response begins or ends with; None: there is none of that id."""
        made = ITEM_ID.fullmatch(item_id)
        stored = None if made is None else self._found(RESPONSE_ID.format(made["unique"]), owner)
        items = () if stored is None else stored.items
        return next((item for item in items if item.id == item_id), None)

    def delete(self, response_id: str, owner: str) -> None:
        """Raises ResponseNotFound."""
        self.get(response_id, owner)
        self._remove(owner, response_id)

    def _found(self, response_id: str, owner: str) -> StoredResponse | None:
        """It was used."""
        shelf = self._shelves.get(owner)
        if shelf is None or response_id not in shelf.by_id:
            return None
        shelf.by_id.move_to_end(response_id)
        return shelf.by_id[response_id]

    @property
    def _num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def _part_of(self, owner: str) -> float:
        """Of the room that there is, in number or in bytes."""
        shelf = self._shelves[owner]
        return max(len(shelf.by_id) / self._max_responses, shelf.num_bytes / self._max_bytes)

    def _remove(self, owner: str, response_id: str) -> None:
        shelf = self._shelves[owner]
        shelf.remove(response_id)
        if not shelf.by_id:
            del self._shelves[owner]
