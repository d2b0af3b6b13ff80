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


class ResponseStore:
    """Those that were used least recently give way, when there are too many or too large ones."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_id: OrderedDict[str, StoredResponse] = OrderedDict()  # the next to go first

    def __len__(self) -> int:
        return len(self._by_id)

    def put(self, stored: StoredResponse) -> None:
        """Keep a new one; one that is larger than the whole store is not kept."""
        if stored.num_bytes > self._max_bytes:
            return
        self._by_id[stored.id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._by_id) > self._max_responses or self._num_bytes > self._max_bytes:
            _, oldest = self._by_id.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """Raises ResponseNotFound, which names the parameter."""
        stored = self._by_id.get(response_id)
        if stored is None or stored.owner != owner:
            raise ResponseNotFound(
                f"there is no response {response_id[:128]!r} here, or no longer", param
            )
        self._by_id.move_to_end(response_id)
        return stored

    def find_item(self, item_id: str, owner: str) -> KeptItem | None:
        """One that a kept response begins or ends with; None: there is none of that id."""
        made = ITEM_ID.fullmatch(item_id)
        stored = None if made is None else self._by_id.get(RESPONSE_ID.format(made["unique"]))
        if stored is None or stored.owner != owner:
            return None
        self._by_id.move_to_end(stored.id)
        return next((item for item in stored.items if item.id == item_id), None)

    def delete(self, response_id: str, owner: str) -> None:
        """Raises ResponseNotFound."""
        self._num_bytes -= self.get(response_id, owner).num_bytes
        del self._by_id[response_id]
