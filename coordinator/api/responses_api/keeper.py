"""Stores a response once it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.api.responses_api.asked import Asked
from coordinator.api.responses_api.items import Item
from coordinator.api.responses_api.objects import Response
from coordinator.api.responses_api.store import ResponseStore
from coordinator.api.responses_api.stored import EventLog, StoredResponse, items_bytes


@dataclass(frozen=True, slots=True)
class Keeper:
    """Stores one response."""

    store: ResponseStore
    asked: Asked
    new_bytes: int  # size of the new input items
    stored: StoredResponse

    def keep(self, body: bytes, output: Sequence[Item]) -> None:
        """Store a finished response, unless `store` is false.

        If it belongs to a conversation, the new input and the output are appended to that.
        """
        output_bytes = items_bytes(output)
        conversation = self.asked.conversation
        if conversation is not None:
            conversation.add([*self.asked.new, *output], self.new_bytes + output_bytes)
            self.store.changed(conversation)
        self.stored.answered(body, output, output_bytes)
        if self.stored.is_background:
            self.store.changed(self.stored)
        elif self.asked.body.store is not False:
            self.store.put(self.stored)


def make_keeper(store: ResponseStore, asked: Asked, response: Response, owner: str) -> Keeper:
    """Return the keeper of a response that is about to be generated."""
    items, new_bytes = asked.items, items_bytes(asked.new)
    stored = StoredResponse(
        id=response.id,
        owner=owner,
        body=b"",
        items=tuple(items),
        num_input_items=len(items),
        items_bytes=asked.earlier_bytes + new_bytes,
        is_background=response.background,
        log=EventLog() if response.background and asked.body.stream else None,
    )
    return Keeper(store, asked, new_bytes, stored)
