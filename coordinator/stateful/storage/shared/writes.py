"""One transaction of what a coordinator has to write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from coordinator.stateful.storage.backing import Change, Key
from coordinator.stateful.storage.item_rows import Rows
from coordinator.stateful.storage.packed_items import PackedItem, items_bytes
from coordinator.stateful.storage.saved_entries import decoded, encoder_of
from coordinator.stateful.storage.shared import tables
from coordinator.stateful.storage.shared.item_table import give_items, read_items, write_items
from coordinator.stateful.storage.shared.link import DatabaseLink
from coordinator.stateful.storage.stored import Stored, StoredConversation, StoredResponse
from pdserve.shared.errors import RequestError

if TYPE_CHECKING:
    from coordinator.stateful.storage.shared.link import Connection


@dataclass(frozen=True, slots=True)
class Write:
    """What is to be written of one entry."""

    stored: Stored
    encode: Callable[[], bytes] | None = None  # None: no more than its events, or its end
    items: Sequence[PackedItem] = ()  # of a conversation; those of a response are in its entry
    changes: tuple[Change, ...] = ()  # what was done to a conversation
    is_deleted: bool = False

    def then(self, later: Write) -> Write:
        """Return what both come to."""
        if self.is_deleted or later.is_deleted:
            return later
        return replace(
            later, encode=later.encode or self.encode, changes=self.changes + later.changes
        )


def write_of(stored: Stored, changes: tuple[Change, ...] = ()) -> Write:
    """Return the writing of an entry as it is now."""
    is_talk = isinstance(stored, StoredConversation)
    items = tuple(stored.items if is_talk else ())
    return Write(stored, encoder_of(stored, has_items=not is_talk), items, changes)


@dataclass(slots=True)
class Made:
    """A response that this coordinator makes in the background."""

    stored: StoredResponse
    run: int  # which of its runs this is
    is_ours: bool = False  # its row says so
    num_events: int = 0  # that are written

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come: neither of itself, nor of its events."""
        stored = self.stored
        is_made = stored.order is None or stored.is_answer
        return is_made and (stored.log is None or stored.log.is_closed)


@dataclass(slots=True)
class TableRows:
    """What this coordinator knows of the rows whose entries it has in memory."""

    versions: dict[Key, int] = field(default_factory=dict)
    items: dict[Key, Rows] = field(default_factory=dict)  # of conversations
    made: dict[Key, Made] = field(default_factory=dict)

    def forget(self, key: Key) -> None:
        """Know nothing of a row."""
        self.versions.pop(key, None)
        self.items.pop(key, None)
        self.made.pop(key, None)


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """What a transaction has made of one entry."""

    version: int | None = None  # None: the entry is not stored any more, or is another's to change
    items: Rows = field(default_factory=list)  # of a conversation
    merged: StoredConversation | None = None  # others had changed it, too
    num_events: int = 0
    is_over: bool = False


class Writer:
    """Writes as one coordinator."""

    def __init__(
        self, link: DatabaseLink, coordinator: str, lives: timedelta, rows: TableRows
    ) -> None:
        self._link = link
        self._coordinator = coordinator
        self._lives = lives
        self._rows = rows

    async def write(self, batch: Mapping[Key, Write]) -> dict[Key, WriteOutcome]:
        """Write all of a batch in one transaction. Raises StoreUnavailable."""
        entries = await asyncio.to_thread(_encoded, batch)
        outcomes: dict[Key, WriteOutcome] = {}
        async with self._link.transaction() as connection:
            for key, write in sorted(batch.items(), key=_by_key):  # so none waits for another
                if write.is_deleted:
                    await connection.execute(tables.DELETE, *key)
                elif isinstance(write.stored, StoredConversation):
                    outcomes[key] = await self._conversation(connection, key, write, entries[key])
                else:
                    outcomes[key] = await self._response(connection, write.stored, entries[key])
                if write.is_deleted or isinstance(write.stored, StoredResponse):
                    told = msgspec.json.encode(key).decode()
                    await connection.execute(tables.NOTIFY, told)
        return outcomes

    async def _conversation(
        self, connection: Connection, key: Key, write: Write, entry: bytes | None
    ) -> WriteOutcome:
        num_bytes, known = items_bytes(write.items), self._rows.items.get(key, [])
        version = self._rows.versions.get(key)
        if not write.changes:
            version = await connection.fetchval(tables.INSERT, *key, entry, None, num_bytes)
            known = []
        elif version is not None:
            version = await connection.fetchval(tables.REPLACE, *key, entry, version, num_bytes)
        if version is None:
            return await self._merged(connection, key, write, known)
        return WriteOutcome(version, await write_items(connection, key, known, write.items))

    async def _merged(
        self, connection: Connection, key: Key, write: Write, known: Rows
    ) -> WriteOutcome:
        """Do what was done here to what other coordinators have made of a conversation."""
        theirs = await connection.fetchval(tables.LOCK_ENTRY, *key)
        if theirs is None:
            return WriteOutcome()
        rows = await read_items(connection, key, known)
        merged = decoded(*key, theirs)
        assert isinstance(merged, StoredConversation)
        give_items(merged, rows)
        for change in write.changes:
            # Another coordinator has removed it, too, or has taken the room: `check_kept`.
            with suppress(RequestError):
                change(merged)
        entry = encoder_of(merged, has_items=False)()
        put = (*key, entry, None, merged.items_bytes)
        version = await connection.fetchval(tables.REPLACE, *put)
        return WriteOutcome(version, await write_items(connection, key, rows, merged.items), merged)

    async def _response(
        self, connection: Connection, stored: StoredResponse, entry: bytes | None
    ) -> WriteOutcome:
        key = (stored.owner, stored.id)
        made = self._rows.made.get(key)
        if made is None and entry is None:  # all of it was in the transaction before
            return WriteOutcome(self._rows.versions.get(key))
        if made is None:  # in one piece
            return WriteOutcome(await connection.fetchval(tables.INSERT, *key, entry, None, 0))
        is_over, us = made.is_over, self._coordinator
        maker = None if is_over else us
        version = self._rows.versions.get(key)
        if not made.is_ours:
            await connection.execute(tables.LIVE, us, self._lives)  # it may not have beaten yet
            first = encoder_of(stored)() if entry is None else entry
            version = await connection.fetchval(tables.INSERT, *key, first, us, 0)
        events = [] if stored.log is None else stored.log.events[made.num_events :]
        if events:
            told = (*key, made.run, made.num_events, events, us)
            await connection.execute(tables.ADD_EVENTS, *told)
        if entry is not None or is_over:
            last = encoder_of(stored)() if entry is None else entry
            version = await connection.fetchval(tables.FINISH, *key, last, maker, us)
        return WriteOutcome(version, num_events=made.num_events + len(events), is_over=is_over)


def _encoded(batch: Mapping[Key, Write]) -> dict[Key, bytes | None]:
    return {k: None if w.encode is None else w.encode() for k, w in batch.items()}


def _by_key(item: tuple[Key, Write]) -> Key:
    return item[0]
