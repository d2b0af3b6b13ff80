"""Stores responses and conversations in memory and, if there is one, in a file."""

from __future__ import annotations

import re
from collections import OrderedDict

from aiohttp import web

from coordinator.api.responses.items import KeptItem
from coordinator.stateful.storage.saved_entries import decoded, encoder_of
from coordinator.stateful.storage.store_file import StoreFile
from coordinator.stateful.storage.stored import (
    RESPONSE_ID,
    Stored,
    StoredConversation,
    StoredResponse,
)
from pdserve.errors import (
    ConversationNotFound,
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
)

MAX_RESPONSES = 4096  # responses and conversations kept for later requests
MAX_BYTES = 256 * 2**20
ITEM_ID = re.compile(r"[a-z]+_(?P<unique>[0-9a-f]{32})_\w+")  # `unique` is its response's, too


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


class ResponseStore:
    """A bounded store of responses and conversations, fair between owners.

    When it is full, the owner with the largest share loses its least recently used entry. So no
    owner can evict entries of another that uses less than an even share. A response that is evicted
    while it is being generated is cancelled.

    With a file, it begins with what that has, and has to be closed. Raises msgspec.MsgspecError for
    a file with other entries.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        file: StoreFile | None = None,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._file = file
        self._shelves: dict[str, _Shelf] = {}  # owner |-> its entries, at least one
        for owner, stored_id, entry in file.load() if file is not None else ():
            self._take(decoded(owner, stored_id, entry))

    def __len__(self) -> int:
        return sum(len(shelf.by_id) for shelf in self._shelves.values())

    def put(self, stored: Stored) -> None:
        """Store a new entry; one that is larger than the whole store is not kept."""
        if stored.num_bytes > self._max_bytes:
            stored.forget()
            return
        if self._file is not None and stored.is_durable:
            self._file.put((stored.owner, stored.id), encoder_of(stored))
        self._take(stored)

    def _take(self, stored: Stored) -> None:
        """Take a new or a changed entry in; others go if there is no room."""
        self._shelves.setdefault(stored.owner, _Shelf()).add(stored)
        while len(self) > self._max_responses or self._num_bytes > self._max_bytes:
            owner = max(self._shelves, key=self._part_of)
            self._remove(owner, next(iter(self._shelves[owner].by_id)))

    def changed(self, stored: Stored) -> None:
        """Update a changed entry, if it is still stored."""
        if not self.has(stored):
            return
        if stored.num_bytes > self._max_bytes:
            self._remove(stored.owner, stored.id)
        else:
            self.put(stored)

    def logged(self, stored: StoredResponse) -> None:
        """Update the size of a response whose event log has grown; the log is in memory only."""
        if not self.has(stored):
            return
        if stored.num_bytes > self._max_bytes:
            self._remove(stored.owner, stored.id)
        else:
            self._take(stored)

    @property
    def is_durable(self) -> bool:
        """Whether a later coordinator finds what is stored."""
        return self._file is not None

    def unfinished(self) -> list[StoredResponse]:
        """Return the background responses that a former coordinator has not finished."""
        return [
            stored
            for shelf in self._shelves.values()
            for stored in shelf.by_id.values()
            if isinstance(stored, StoredResponse) and stored.order is not None
        ]

    async def saved(self) -> None:
        """Wait until the file, if there is one, has all of this. Raises StoreUnavailable."""
        if self._file is not None:
            await self._file.saved()

    async def close(self) -> None:
        """Write what is still to be written, and close the file."""
        if self._file is not None:
            await self._file.close()

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response of this owner. Raises ResponseNotFound."""
        stored = self._found(response_id, owner)
        if not isinstance(stored, StoredResponse):
            raise ResponseNotFound(f"Response with id {response_id[:128]!r} not found.")
        return stored

    def get_previous(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response of this owner that can be continued.

        Raises PreviousResponseNotFound, or InvalidRequest for a response without an answer.
        """
        stored = self._found(response_id, owner)
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
        stored = self._found(conversation_id, owner)
        if not isinstance(stored, StoredConversation):
            raise ConversationNotFound(
                f"Conversation with id {conversation_id[:128]!r} not found.", param
            )
        return stored

    def find_item(self, item_id: str, owner: str) -> KeptItem | None:
        """Return an item by its id, from the stored response of its call; None if not found."""
        made = ITEM_ID.fullmatch(item_id)
        stored = None if made is None else self._found(RESPONSE_ID.format(made["unique"]), owner)
        items = () if stored is None else stored.items
        return next((item for item in items if item.id == item_id), None)

    def has(self, stored: Stored) -> bool:
        """Return whether this very object is still stored; if so, mark it as recently used."""
        return self._found(stored.id, stored.owner) is stored

    def discard(self, stored: Stored) -> None:
        """Remove an entry, if it is still stored."""
        if self.has(stored):
            self._remove(stored.owner, stored.id)

    def _found(self, stored_id: str, owner: str) -> Stored | None:
        """Return an entry of this owner, and mark it as recently used."""
        shelf = self._shelves.get(owner)
        if shelf is None or stored_id not in shelf.by_id:
            return None
        shelf.by_id.move_to_end(stored_id)
        return shelf.by_id[stored_id]

    @property
    def _num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def _part_of(self, owner: str) -> float:
        """Return the owner's share of the store, by number or by bytes, whichever is larger."""
        shelf = self._shelves[owner]
        return max(len(shelf.by_id) / self._max_responses, shelf.num_bytes / self._max_bytes)

    def _remove(self, owner: str, stored_id: str) -> None:
        shelf = self._shelves[owner]
        removed = shelf.remove(stored_id)
        removed.forget()
        if self._file is not None and removed.is_durable:
            self._file.delete((owner, stored_id))
        if not shelf.by_id:
            del self._shelves[owner]


STORE = web.AppKey("STORE", ResponseStore)
