"""Stores responses and conversations in memory and, if there is one, in what is behind it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from aiohttp import web

from coordinator.stateful.storage.backing import Backing, Change
from coordinator.stateful.storage.packed_items import PackedItem
from coordinator.stateful.storage.shelves import Shelves
from coordinator.stateful.storage.stored import (
    RESPONSE_ID,
    EventLog,
    Stored,
    StoredConversation,
    StoredResponse,
)
from pdserve.shared.errors import (
    ConversationNotFound,
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
)

MAX_RESPONSES = 4096  # responses and conversations kept for later requests
MAX_BYTES = 64 * 2**20
_STORED_ID = re.compile(r"(resp|conv)_[0-9A-Za-z]{1,64}")
ITEM_ID = re.compile(r"[a-z]+_(?P<unique>[0-9a-f]{32})_\w+")  # `unique` is its response's, too


class ResponseStore:
    """A bounded store of responses and conversations, fair between owners.

    When it is full, the owner with the largest share loses its least recently used entry. So no
    owner can evict entries of another that uses less than an even share. A response that is evicted
    while it is being generated is cancelled.

    With something behind it, it begins with what that has, and has to be closed. Where several
    coordinators share that, memory has what was last seen of it, and `look` looks again. Raises
    msgspec.MsgspecError for a file with other entries.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        backing: Backing | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._shelves = Shelves(max_responses, max_bytes)
        self._backing = backing or Backing()
        for stored in self._backing.load():
            self._take(stored)

    def __len__(self) -> int:
        return len(self._shelves)

    @property
    def num_bytes(self) -> int:
        """The memory that all entries take."""
        return self._shelves.num_bytes

    def put(self, stored: Stored) -> None:
        """Store a new entry; one that is larger than the whole store is not kept."""
        if stored.num_bytes > self._max_bytes:
            stored.forget()
            return
        if stored.is_durable:
            self._backing.put(stored)
        self._take(stored)

    def _take(self, stored: Stored) -> None:
        """Take a new or a changed entry in; others go if there is no room."""
        for evicted in self._shelves.add(stored):
            evicted.forget()
            if evicted.is_durable:
                self._backing.evict(evicted)

    def changed(self, stored: Stored) -> None:
        """Update a changed entry, if it is still stored."""
        if not self.has(stored):
            return
        if stored.num_bytes > self._max_bytes:
            self._remove(stored.owner, stored.id)
        else:
            self.put(stored)

    def change(self, conversation: StoredConversation, change: Change) -> None:
        """Change a conversation, if it is still stored. Raises what `change` raises."""
        change(conversation)
        if not self.has(conversation) and not self._backing.outlives_memory:
            return
        if conversation.num_bytes > self._max_bytes:
            self._remove(conversation.owner, conversation.id)
        else:
            self._backing.put(conversation, change)
            self._take(conversation)

    def logged(self, stored: StoredResponse) -> None:
        """Update the size of a response whose event log has grown."""
        if not self.has(stored):
            return
        if stored.num_bytes > self._max_bytes:
            self._remove(stored.owner, stored.id)
        else:
            self._backing.logged(stored)
            self._take(stored)

    @property
    def is_durable(self) -> bool:
        """Whether a later coordinator finds what is stored."""
        return self._backing.is_durable

    def go_on(self, again: Callable[[StoredResponse], None]) -> None:
        """Have `again` called with each background response that no coordinator makes any more."""

        def taken(stored: Stored) -> None:
            self._take(stored)
            if isinstance(stored, StoredResponse) and stored.order is not None:
                again(stored)

        for stored in self.unfinished():
            again(stored)
        self._backing.begin(taken, self._dropped)

    def unfinished(self) -> list[StoredResponse]:
        """Return the background responses that are not finished."""
        return [
            stored
            for stored in self._shelves
            if isinstance(stored, StoredResponse) and stored.order is not None
        ]

    async def look(self, owner: str, *ids: str) -> None:
        """Have these entries here as other coordinators left them. Raises StoreUnavailable."""
        known = {(owner, i): self._shelves.find(owner, i) for i in ids if _STORED_ID.fullmatch(i)}
        for key, stored in (await self._backing.newer(known)).items():
            if stored is not None:
                self._take(stored)
            elif (known_here := known[key]) is not None:
                self._dropped(known_here)

    async def log_of(self, stored: StoredResponse) -> EventLog | None:
        """Return the events of a response; None: none were kept. Raises StoreUnavailable."""
        return stored.log or await self._backing.log_of(stored)

    async def stop(self, stored: StoredResponse, timeout_s: float) -> None:
        """Stop making a response, wherever it is made, and wait for it at most that long.

        Raises StoreUnavailable.
        """
        if stored.making is not None and stored.is_being_made:
            stored.making.cancel()
            await asyncio.wait([stored.making], timeout=timeout_s)
            await self._backing.saved()
        elif stored.order is not None:
            await self._backing.stop(stored, timeout_s)
            await self.look(stored.owner, stored.id)

    async def saved(self) -> None:
        """Wait until all of this is written where it outlives us. Raises StoreUnavailable."""
        await self._backing.saved()

    async def close(self) -> None:
        """Write what is still to be written, and let go of what is behind the memory."""
        await self._backing.close()

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response of this owner. Raises ResponseNotFound."""
        stored = self._shelves.find(owner, response_id)
        if not isinstance(stored, StoredResponse):
            raise ResponseNotFound(f"Response with id {response_id[:128]!r} not found.")
        return stored

    def get_previous(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response of this owner that can be continued.

        Raises PreviousResponseNotFound, or InvalidRequest for a response without an answer.
        """
        stored = self._shelves.find(owner, response_id)
        param = "previous_response_id"
        if not isinstance(stored, StoredResponse):
            raise PreviousResponseNotFound(
                f"Previous response with id {response_id[:128]!r} not found.", param
            )
        if not stored.is_answer:
            raise InvalidRequest(
                f"{stored.id!r} cannot be continued: only a response with a complete answer can be",
                param,
            )
        return stored

    def get_conversation(
        self, conversation_id: str, owner: str, param: str | None = None
    ) -> StoredConversation:
        """Return a conversation of this owner. Raises ConversationNotFound, which names `param`."""
        stored = self._shelves.find(owner, conversation_id)
        if not isinstance(stored, StoredConversation):
            raise ConversationNotFound(
                f"Conversation with id {conversation_id[:128]!r} not found.", param
            )
        return stored

    def find_item(self, item_id: str, owner: str) -> PackedItem | None:
        """Return an item by its id, from the stored response of its call; None if not found."""
        response_id = response_of(item_id)
        stored = None if response_id is None else self._shelves.find(owner, response_id)
        items = () if stored is None else stored.items
        return next((item for item in items if item.id == item_id), None)

    def has(self, stored: Stored) -> bool:
        """Return whether this very object is still stored; if so, mark it as recently used."""
        return self._shelves.find(stored.owner, stored.id) is stored

    def discard(self, stored: Stored) -> None:
        """Remove an entry, if it is still stored."""
        if self.has(stored):
            self._remove(stored.owner, stored.id)

    def _remove(self, owner: str, stored_id: str) -> None:
        removed = self._drop(owner, stored_id)
        if removed.is_durable:
            self._backing.delete(removed)

    def _dropped(self, stored: Stored) -> None:
        """Know that an entry is not stored any more."""
        if self.has(stored):
            self._drop(stored.owner, stored.id)

    def _drop(self, owner: str, stored_id: str) -> Stored:
        removed = self._shelves.remove(owner, stored_id)
        removed.forget()
        return removed


def response_of(item_id: object) -> str | None:
    """Return the id of the response in whose call an item was made; None: it is no such id."""
    made = ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return None if made is None else RESPONSE_ID.format(made["unique"])


STORE = web.AppKey("STORE", ResponseStore)
