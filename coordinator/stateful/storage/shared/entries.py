"""What is behind the memory of a coordinator that shares its stored responses with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final
from uuid import uuid4
from weakref import WeakSet

import msgspec

from coordinator.stateful.storage.backing import Backing, Change, Key, Known
from coordinator.stateful.storage.saved_entries import decoded
from coordinator.stateful.storage.shared import tables
from coordinator.stateful.storage.shared.item_table import give_items, last_of, rows_now
from coordinator.stateful.storage.shared.link import DatabaseLink, may_be_id
from coordinator.stateful.storage.shared.membership import BEAT_S, LIVES_BEATS, Membership
from coordinator.stateful.storage.shared.remote_log import RemoteLog
from coordinator.stateful.storage.shared.writes import (
    Made,
    TableRows,
    Write,
    WriteOutcome,
    Writer,
    write_of,
)
from coordinator.stateful.storage.stored import EventLog, Stored, StoredConversation, StoredResponse
from coordinator.stateful.storage.write_behind import WriteBehind
from pdserve.shared.errors import RequestError

if TYPE_CHECKING:
    import asyncpg

MAX_ENTRIES: Final = 100_000  # of all coordinators; trimmed once a minute
MAX_BYTES: Final = 16 * 2**30


class SharedEntries(Backing):
    """The tables, as one coordinator uses them.

    A conversation is changed in memory at once; if another coordinator had changed its row, the
    same is done to that, and memory gets what comes of both. Raises ConfigError for a bad URL; a
    database that is not there is tried again and again.
    """

    is_durable = True
    outlives_memory = True

    def __init__(
        self,
        url: str,
        *,
        beat_s: float = BEAT_S,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._link = DatabaseLink(url)
        self._rows = TableRows()
        coordinator = uuid4().hex
        lives = timedelta(seconds=LIVES_BEATS * beat_s)
        self._writer = Writer(self._link, coordinator, lives, self._rows)
        self._behind: WriteBehind[Write] = WriteBehind(self._link.name, self._write, Write.then)
        self._evicted: set[Key] = set()  # from memory, while it was written
        self._followed: WeakSet[RemoteLog] = WeakSet()
        self._membership = Membership(
            self._link,
            coordinator,
            beat_s=beat_s,
            lives=lives,
            heard=self._heard,
            ours=lambda: {key for key, made in self._rows.made.items() if made.is_ours},
            looked=self._looked,
            claimed=self._claimed,
            bounds=(max_entries, max_bytes),
        )
        self._taken: Callable[[Stored], None] = lambda _: None
        self._dropped: Callable[[Stored], None] = lambda _: None

    def begin(self, taken: Callable[[Stored], None], dropped: Callable[[Stored], None]) -> None:
        """Begin to live among the coordinators that share the tables."""
        self._taken, self._dropped = taken, dropped
        self._membership.begin()

    # ---- writing -------------------------------------------------------------------------------

    def put(self, stored: Stored, change: Change | None = None) -> None:
        """Have an entry written; while it has an order, it is ours to make."""
        key = (stored.owner, stored.id)
        if isinstance(stored, StoredResponse) and stored.order is not None:
            made = self._rows.made.get(key)
            if made is None:
                self._rows.made[key] = Made(stored, stored.order.num_runs)
            elif made.stored is not stored:  # begun again
                is_ours = made.is_ours
                self._rows.made[key] = Made(stored, stored.order.num_runs, is_ours)
        self._evicted.discard(key)
        changes = () if change is None else (change,)
        self._behind.put(key, write_of(stored, changes))

    def logged(self, stored: StoredResponse) -> None:
        """Have new events written, or that there will be no more."""
        key = (stored.owner, stored.id)
        if key in self._rows.made:
            self._behind.put(key, Write(stored))

    def delete(self, stored: Stored) -> None:
        """Have an entry deleted."""
        key = (stored.owner, stored.id)
        self._rows.forget(key)
        self._behind.put(key, Write(stored, is_deleted=True))

    def evict(self, stored: Stored) -> None:
        """Forget it here only, unless it is being made here, which ends with it."""
        key = (stored.owner, stored.id)
        if key in self._rows.made:
            self.delete(stored)
            return
        self._rows.forget(key)
        if key in self._behind:
            self._evicted.add(key)
        if self._behind.is_behind:
            self._behind.pending.pop(key, None)  # whoever waited for it was told so

    async def saved(self) -> None:
        """Wait until all that was told so far is written. Raises StoreUnavailable."""
        await self._behind.saved()

    async def close(self) -> None:
        """Write what is still to be written, and leave what is unfinished to others."""
        try:
            await self._behind.close()
            await self._membership.leave()
        finally:
            await self._link.close()

    async def _write(self, batch: Mapping[Key, Write]) -> None:
        for key, outcome in (await self._writer.write(batch)).items():
            self._written(key, batch[key].stored, outcome)

    def _written(self, key: Key, stored: Stored, outcome: WriteOutcome) -> None:
        later = self._behind.pending.get(key)
        if outcome.version is None:
            self._rows.forget(key)
            self._behind.pending.pop(key, None)
            return self._dropped(stored)
        if key not in self._evicted:
            self._rows.versions[key] = outcome.version
            if isinstance(stored, StoredConversation):
                self._rows.items[key] = outcome.items
        self._evicted.discard(key)
        made = self._rows.made.get(key)
        if made is not None and made.stored is stored:
            made.is_ours, made.num_events = True, outcome.num_events
            if outcome.is_over:
                del self._rows.made[key]
        if outcome.merged is not None and isinstance(stored, StoredConversation):
            stored.become(outcome.merged)
            for change in () if later is None else later.changes:
                with suppress(RequestError):  # as with those before
                    change(stored)
            if later is not None and not later.is_deleted:
                self._behind.pending[key] = write_of(stored, later.changes)
            self._taken(stored)
        return None

    # ---- looking -------------------------------------------------------------------------------

    async def newer(self, known: Known) -> Known:
        """Return those entries that others have changed or deleted. Raises StoreUnavailable."""
        if any(key in self._behind for key in known):
            await self._behind.saved()
        asked = [key for key in known if key not in self._rows.made and may_be_id(key[1])]
        if not asked:
            return {}
        before = {key: self._rows.versions.get(key) for key in asked}
        versions = [None if known[key] is None else before[key] for key in asked]
        rows_before = [self._rows.items.get(key, []) for key in asked]
        owners, names = zip(*asked, strict=True)
        columns = (owners, names, versions, [last_of(rows) for rows in rows_before])
        async with self._link.connection() as connection:
            rows = await connection.fetch(tables.LOOK, *columns)
            for row in rows:
                if row["is_stale"]:
                    await connection.execute(tables.TOUCH, row["owner"], row["id"])
        found: dict[Key, Stored | None] = {}
        for owner, stored_id, version, _, packed, seqs, items in rows:
            key = (owner, stored_id)
            is_written = key in self._behind or key in self._rows.made
            if is_written or self._rows.versions.get(key) != before[key]:
                continue  # it has been changed here meanwhile
            if version is None:
                self._rows.forget(key)
                found[key] = None
            elif packed is not None:
                self._rows.versions[key] = version
                fresh = decoded(owner, stored_id, packed)
                if isinstance(fresh, StoredConversation):
                    now = rows_now(self._rows.items.get(key, []), seqs, items)
                    give_items(fresh, now)
                    self._rows.items[key] = now
                found[key] = _taken_from(fresh, known[key])
        return found

    async def log_of(self, stored: StoredResponse) -> EventLog | None:
        """Return the events of a response that another coordinator makes or has made."""
        events = self._remote_log(stored)
        await events.read()
        is_streamed = stored.order is not None and stored.order.is_streamed
        return events if events.events or is_streamed else None

    async def stop(self, stored: StoredResponse, timeout_s: float) -> None:
        """Have another coordinator stop making a response. Raises StoreUnavailable."""
        key = (stored.owner, stored.id)
        events = self._remote_log(stored)
        async with self._link.connection() as connection:
            await connection.execute(tables.STOP, *key)
            told = msgspec.json.encode(key).decode()
            await connection.execute(tables.NOTIFY, told)
        await events.closed(timeout_s)

    def _remote_log(self, stored: StoredResponse) -> RemoteLog:
        events = RemoteLog(self._link, (stored.owner, stored.id))
        self._followed.add(events)
        return events

    # ---- what others do ------------------------------------------------------------------------

    def _heard(self, told: str) -> None:
        key = msgspec.json.decode(told, type=tuple[str, str])
        for events in self._followed:
            if events.key == key:
                events.tell()
        if key in self._rows.made:
            self._membership.beat_now()

    def _looked(self, lost: set[Key], stopped: set[Key]) -> None:
        if self._behind.is_behind:
            self._behind.begin()  # the database is there again
        for key in lost & self._rows.made.keys():  # they were deleted, or are another's
            if key in self._behind:
                continue  # or it was finished just now
            made = self._rows.made[key]
            self._rows.forget(key)
            self._dropped(made.stored)
        for key in stopped & self._rows.made.keys():
            making = self._rows.made[key].stored.making
            if making is not None:
                making.cancel()

    def _claimed(self, rows: list[asyncpg.Record]) -> None:
        for owner, stored_id, version, packed, is_stopped in rows:
            key = (owner, stored_id)
            stored = decoded(owner, stored_id, packed)
            assert isinstance(stored, StoredResponse)
            run = 0 if stored.order is None else stored.order.num_runs
            self._rows.versions[key] = version
            self._rows.made[key] = Made(stored, run, is_ours=True)
            self._taken(stored)
            if stored.order is None:
                self.put(stored)
            elif is_stopped and stored.making is not None:
                stored.making.cancel()


def _taken_from(fresh: Stored, known: Stored | None) -> Stored:
    """Return what memory has to have: the same conversation, or another response."""
    if isinstance(fresh, StoredConversation) and isinstance(known, StoredConversation):
        known.become(fresh)
        return known
    if isinstance(fresh, StoredResponse):
        fresh.log = None  # it is where it is made
    return fresh
