"""Stores a response once it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.api.responses.items import Item
from coordinator.api.responses.objects import Response
from coordinator.stateful.asked import Asked
from coordinator.stateful.storage.packed_items import PackedItem, items_bytes, pack
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.stored import (
    RESPONSE_ID,
    EventLog,
    StoredConversation,
    StoredResponse,
)


@dataclass(frozen=True, slots=True)
class Keeper:
    """Stores one response."""

    store: ResponseStore
    conversation: StoredConversation | None  # that it belongs to
    new: Sequence[PackedItem]  # input items of the call
    stored: StoredResponse
    is_stored: bool  # unless `store` is false

    def keep(self, body: bytes, output: Sequence[Item]) -> None:
        """Store a finished response, unless `store` is false.

        If it belongs to a conversation, the new input and the output are appended to that. Raises
        InvalidRequest if it has no room for them any more: an answer that is lost there has failed.
        """
        said = pack(output)
        if self.conversation is not None:
            unique = self.stored.id.removeprefix(RESPONSE_ID.format(""))
            added = [*self.new, *said]
            self.store.change(self.conversation, lambda c: c.add(added, unique))
        self.stored.answered(body, said)
        if self.stored.is_background:
            self.store.changed(self.stored)
        elif self.is_stored:
            self.store.put(self.stored)

    async def saved(self) -> None:
        """Wait until what was kept is written. Raises StoreUnavailable, and what `keep` does."""
        await self.store.saved()
        if self.conversation is not None:
            num_before = self.stored.num_input_items - len(self.new)
            self.conversation.check_kept(self.stored.items[num_before:])


def make_keeper(asked: Asked, response: Response, owner: str) -> Keeper:
    """Return the keeper of a response that is about to be generated."""
    items = (*asked.earlier, *asked.new)
    stored = StoredResponse(
        id=response.id,
        owner=owner,
        body=b"",
        items=items,
        num_input_items=len(items),
        items_bytes=asked.earlier_bytes + items_bytes(asked.new),
        is_background=response.background,
        log=EventLog() if response.background and asked.body.stream else None,
    )
    is_stored = asked.body.store is not False
    return Keeper(asked.store, asked.conversation, asked.new, stored, is_stored)
