"""What is kept for clients: responses, and conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from coordinator.api.responses_api.items import KeptItem
from pdserve.errors import ItemNotFound

RESPONSE_ID = "resp_{}"
CONVERSATION_ID = "conv_{}"


def items_bytes(items: Sequence[KeptItem]) -> int:
    """Roughly what they take: together just what each does alone, for they come and go alone."""
    return sum(len(msgspec.json.encode(item)) for item in items)


class EventLog:
    """The events of one stream, for whoever comes to read it."""

    def __init__(self) -> None:
        self.events: list[bytes] = []  # framed; an event's number is its place
        self.num_bytes = 0
        self.is_closed = False
        self._changed = asyncio.Event()

    def add(self, events: Sequence[bytes]) -> None:
        """Tell more."""
        self.events += events
        self.num_bytes += sum(map(len, events))
        self._wake()

    def close(self) -> None:
        """That was all."""
        self.is_closed = True
        self._wake()

    async def changed(self, timeout_s: float) -> None:
        """Wait until there is more, or no more to come, or the time is over."""
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
    """A response, or what there is of it yet."""

    id: str
    owner: str  # the tenant whose call it was: nobody else gets to see it
    body: bytes  # the response as JSON
    items: tuple[KeptItem, ...]  # the conversation up to its end, without instructions
    num_input_items: int  # of which so many were there before it began
    items_bytes: int  # counted as if no other response shared them
    is_answer: bool = False  # complete or cut off: it can be gone on from
    is_background: bool = False
    log: EventLog | None = None  # of one that is streamed and in the background
    making: asyncio.Task[None] | None = None  # what is at work on it in the background

    @property
    def num_bytes(self) -> int:
        """Roughly what it takes."""
        logged_bytes = 0 if self.log is None else self.log.num_bytes
        return len(self.body) + self.items_bytes + logged_bytes

    @property
    def is_being_made(self) -> bool:
        """Whether more of it will come."""
        return self.making is not None and not self.making.done()

    def answered(self, body: bytes, output: Sequence[KeptItem], output_bytes: int) -> None:
        """This is all of it."""
        self.body = body
        self.items += tuple(output)
        self.items_bytes += output_bytes
        self.is_answer = True

    def forget(self) -> None:
        """Nobody can ask for it any more."""
        if self.making is not None:
            self.making.cancel()


@dataclass(slots=True, kw_only=True)
class StoredConversation:
    """Items that responses go on from, and add to."""

    id: str
    owner: str
    created_at: int  # seconds since 1970
    metadata: dict[str, str]
    items: list[KeptItem] = field(default_factory=list)
    items_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Roughly what it takes."""
        return len(msgspec.json.encode(self.metadata)) + self.items_bytes

    def add(self, items: Sequence[KeptItem], num_bytes: int) -> None:
        """They follow."""
        self.items += items
        self.items_bytes += num_bytes

    def find(self, item_id: str) -> KeptItem:
        """Raises ItemNotFound."""
        for item in self.items:
            if item.id == item_id:
                return item
        raise ItemNotFound(f"there is no item {item_id[:128]!r} in {self.id!r}", "item_id")

    def remove(self, item_id: str) -> None:
        """Raises ItemNotFound."""
        item = self.find(item_id)
        self.items.remove(item)
        self.items_bytes -= items_bytes([item])

    def forget(self) -> None:
        """Nobody can ask for it any more."""
