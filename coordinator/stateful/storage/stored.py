"""Stored responses and conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import ClassVar, Final

import msgspec

from coordinator.api.read.chat import MAX_MESSAGES
from coordinator.stateful.storage.order import Order
from coordinator.stateful.storage.packed_items import PackedItem, items_bytes
from pdserve.shared.errors import InvalidRequest, ItemNotFound

RESPONSE_ID = "resp_{}"
CONVERSATION_ID = "conv_{}"


MAX_ITEMS: Final = MAX_MESSAGES  # of one conversation
MAX_ITEMS_BYTES: Final = 4 * 2**20
_OBJECTS: Final = 2048  # bytes of an entry besides its contents, wherever it is registered


def check_length(num_items: int, num_bytes: int, param: str) -> None:
    """Refuse what would make a conversation too long. Raises InvalidRequest."""
    if num_items > MAX_ITEMS or num_bytes > MAX_ITEMS_BYTES:
        raise InvalidRequest(
            f"the conversation would have {num_items} items of {num_bytes} bytes, but it may have "
            f"{MAX_ITEMS} of {MAX_ITEMS_BYTES}: compact it, or begin a new one",
            param,
        )


class EventLog:
    """The events of one stream, for any number of readers."""

    def __init__(self) -> None:
        self.events: list[bytes] = []  # framed; the index is the event's sequence number
        self.num_bytes = 0
        self.is_closed = False
        self._changed = asyncio.Event()

    def add(self, events: Sequence[bytes]) -> None:
        """Append events and wake the readers."""
        self.events += events
        self.num_bytes += sum(map(getsizeof, events)) + 8 * len(events)
        self._wake()

    def close(self) -> None:
        """Mark the log as complete and wake the readers."""
        self.is_closed = True
        self._wake()

    async def changed(self, timeout_s: float) -> None:
        """Wait until events are added, the log is closed, or `timeout_s` has passed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """A stored response, which may still be in progress."""

    id: str
    owner: str  # name of the tenant that made the call; no other tenant can see the response
    body: bytes  # the response as JSON
    items: tuple[PackedItem, ...]  # the conversation up to its end, without instructions
    num_input_items: int  # how many of `items` precede the response's output
    items_bytes: int  # size of `items`, even if other responses share them
    is_answer: bool = False  # complete or cut off, so that it can be continued
    is_background: bool = False
    log: EventLog | None = None  # only of a streamed background response
    making: asyncio.Task[None] | None = None  # task that generates it in the background
    order: Order | None = None  # of a background response, until it is finished
    is_durable: bool = True  # False: of one connection, so it need not survive the coordinator

    @property
    def num_bytes(self) -> int:
        """The memory that the response takes."""
        logged_bytes = 0 if self.log is None else self.log.num_bytes
        ordered_bytes = 0 if self.order is None else len(self.order.body)
        return _OBJECTS + len(self.body) + self.items_bytes + logged_bytes + ordered_bytes

    @property
    def is_being_made(self) -> bool:
        """Whether it is still being generated in the background."""
        return self.making is not None and not self.making.done()

    def answered(self, body: bytes, output: Sequence[PackedItem]) -> None:
        """Record the finished response: its JSON, and its output items."""
        self.body = body
        self.items += tuple(output)
        self.items_bytes += items_bytes(output)
        self.is_answer = True

    def forget(self) -> None:
        """Stop generating the response: it has been removed from the store."""
        if self.making is not None:
            self.making.cancel()


@dataclass(slots=True, kw_only=True)
class StoredConversation:
    """Items that responses continue from and add to."""

    id: str
    owner: str
    created_at: int  # seconds since 1970
    metadata: dict[str, str]
    items: list[PackedItem] = field(default_factory=list)
    items_bytes: int = 0
    last_call: tuple[str, int] = ("", 0)  # that added items: what its ids are made of; items before
    is_durable: ClassVar[bool] = True

    @property
    def num_bytes(self) -> int:
        """The memory that the conversation takes."""
        return _OBJECTS + len(msgspec.json.encode(self.metadata)) + self.items_bytes

    def add(self, items: Sequence[PackedItem], unique: str = "") -> None:
        """Append items. Raises InvalidRequest if that would make it too long.

        `unique` is of the call that adds them. If the last call is made again under its idempotency
        key, they are there already.
        """
        if unique and self.last_call[0] == unique:
            return
        self._check_room(items)
        self.last_call = (unique, len(self.items))
        self.items += items
        self.items_bytes += items_bytes(items)

    def check_kept(self, items: Sequence[PackedItem]) -> None:
        """Make sure that items are in it that were added, or were there.

        Raises InvalidRequest if other coordinators' had taken the room when they were written.
        """
        if items and items[-1] not in self.items:
            self._check_room(items)

    def _check_room(self, items: Sequence[PackedItem]) -> None:
        num_bytes = self.items_bytes + items_bytes(items)
        check_length(len(self.items) + len(items), num_bytes, "conversation")

    def before(self, unique: str) -> Sequence[PackedItem]:
        """Return the items that a call continues: all, unless it is the last one made again."""
        call, num_before = self.last_call
        return tuple(self.items[:num_before] if call == unique else self.items)

    def describe(self, metadata: dict[str, str]) -> None:
        """Replace the metadata."""
        self.metadata = metadata

    def become(self, other: StoredConversation) -> None:
        """Be as another coordinator left it."""
        self.metadata = other.metadata
        self.items = other.items
        self.items_bytes = other.items_bytes
        self.last_call = other.last_call

    def find(self, item_id: str) -> PackedItem:
        """Return an item by its id. Raises ItemNotFound."""
        for item in self.items:
            if item.id == item_id:
                return item
        raise ItemNotFound(f"there is no item {item_id[:128]!r} in {self.id!r}", "item_id")

    def remove(self, item_id: str) -> None:
        """Remove an item by its id. Raises ItemNotFound."""
        item = self.find(item_id)
        self.items.remove(item)
        self.last_call = ("", 0)
        self.items_bytes -= items_bytes([item])

    def forget(self) -> None:
        """Do nothing: a conversation that is removed from the store runs no task."""


Stored = StoredResponse | StoredConversation
