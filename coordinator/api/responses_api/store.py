"""Answers that clients may fetch again, or go on from. In memory: none survives the coordinator."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from coordinator.api.requests import Message
from pdserve.errors import ResponseNotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One of them."""

    id: str
    owner: str  # the tenant whose call it was: nobody else gets to see it
    body: bytes  # the response as JSON
    messages: tuple[Message, ...]  # the conversation up to its end, without instructions
    messages_bytes: int  # counted as if no other response shared them

    @property
    def num_bytes(self) -> int:
        """Roughly what it takes."""
        return len(self.body) + self.messages_bytes


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

    def delete(self, response_id: str, owner: str) -> None:
        """Raises ResponseNotFound."""
        self._num_bytes -= self.get(response_id, owner).num_bytes
        del self._by_id[response_id]
