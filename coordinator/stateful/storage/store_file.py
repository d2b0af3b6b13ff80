"""The SQLite file in which stored responses and conversations survive the coordinator.

All of it is in memory as well (`store.py`), so the file is only read at the start. A dedicated
thread writes; what changes while it writes is one transaction, the next one. A conversation's items
are rows of their own, so that one more is written and not all. An answer that says
that something is stored waits for its transaction (`saved`). A coordinator that is killed loses
nothing that was answered; a machine that loses its power may lose its last moments.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.stateful.storage.backing import Backing, Change, Key
from coordinator.stateful.storage.item_rows import Rows, difference
from coordinator.stateful.storage.packed_items import PackedItem, items_bytes, packed_before
from coordinator.stateful.storage.saved_entries import decoded, encoder_of
from coordinator.stateful.storage.stored import Stored, StoredConversation
from coordinator.stateful.storage.write_behind import WriteBehind
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.may_pass import config_error, has_no_room

log = logging.getLogger(__name__)

VERSION: Final = 2  # of the schema; files of newer ones are refused
_BUSY_S: Final = 5.0  # a coordinator that is being restarted may not have ended yet
_CREATE = """
CREATE TABLE entries (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL, id TEXT NOT NULL, entry BLOB NOT NULL,
    UNIQUE (owner, id)
)
"""
_CREATE_ITEMS = """
CREATE TABLE items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL, conversation TEXT NOT NULL, item BLOB NOT NULL
)
"""
_INDEX_ITEMS = "CREATE INDEX items_of ON items (owner, conversation)"
_PUT = "INSERT OR REPLACE INTO entries (owner, id, entry) VALUES (?, ?, ?)"
_DELETE = "DELETE FROM entries WHERE owner = ? AND id = ?"
_ADD_ITEM = "INSERT INTO items (owner, conversation, item) VALUES (?, ?, ?)"
_DELETE_ITEM = "DELETE FROM items WHERE seq = ?"
_DELETE_ITEMS = "DELETE FROM items WHERE owner = ? AND conversation = ?"
_ITEMS = "SELECT seq, item FROM items WHERE owner = ? AND conversation = ? ORDER BY seq"


@dataclass(frozen=True, slots=True)
class _Write:
    """An entry as it is to be in the file."""

    encode: Callable[[], bytes]  # called by the writer's thread
    items: Sequence[PackedItem] = ()  # of a conversation; those of a response are in its entry


def _reason(error: sqlite3.Error | OSError) -> str:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        return "another coordinator has it, which serves this model at this port"
    return str(error)


class StoreFile(Backing):
    """One file, which no other coordinator can open meanwhile."""

    is_durable = True

    def __init__(self, path: Path, busy_s: float = _BUSY_S) -> None:
        """Open the file, or create it.

        Raises:
            ConfigError: it cannot be used; says why.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it has what users have written
            self._database = sqlite3.connect(path, timeout=busy_s, check_same_thread=False)
            self._is_prepared = self._has_prepared()
        except (sqlite3.Error, OSError) as error:
            raise config_error(
                f"cannot keep stored responses in {path}: {_reason(error)}; name another file with "
                "`answers.store`, or 'memory' to keep them in memory",
                error,
            ) from error
        self._writer = ThreadPoolExecutor(1, "store")
        self._rows: dict[Key, Rows] = {}  # of conversations, as they are there
        self._behind: WriteBehind[_Write | None] = WriteBehind(
            str(path), self._write, lambda _, newer: newer
        )  # None: deleted

    def load(self) -> Iterator[Stored]:
        """Raises msgspec.MsgspecError for entries that are not pdserve's."""
        if not self._is_prepared and self._version() == 0:
            return iter(())  # it is empty
        entries = self._database.execute("SELECT owner, id, entry FROM entries ORDER BY seq")
        return (self._loaded(decoded(*entry)) for entry in entries)

    def put(self, stored: Stored, change: Change | None = None) -> None:
        """Have an entry written."""
        is_talk = isinstance(stored, StoredConversation)
        write = _Write(
            encoder_of(stored, has_items=not is_talk), tuple(stored.items if is_talk else ())
        )
        self._behind.put((stored.owner, stored.id), write)

    def delete(self, stored: Stored) -> None:
        """Have an entry deleted."""
        self._behind.put((stored.owner, stored.id), None)

    async def saved(self) -> None:
        """Wait until all that was put or deleted so far is in the file. Raises StoreUnavailable."""
        await self._behind.saved()

    async def close(self) -> None:
        """Write what is still to be written, and close the file."""
        try:
            await self._behind.close()
        finally:
            self._writer.shutdown()
            self._database.close()

    def _has_prepared(self) -> bool:
        """Prepare the file; False: there is no room for that now. Raises sqlite3.Error.

        A coordinator that ends while its disk is full is not kept from starting by that. What is to
        be stored is refused until there is room.
        """
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._database.rollback()
            if not has_no_room(error):
                self._database.close()
                raise
            log.error("stored responses cannot be written: %s: %s", self._path, error)
            return self._version() == VERSION
        return True

    def _version(self) -> int:
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        return int(version)

    def _prepare(self) -> None:
        database = self._database
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA secure_delete = ON")
        version = self._version()
        if version > VERSION:
            raise ConfigError(
                f"{self._path} was written by a newer pdserve (schema {version}, this one knows "
                f"{VERSION}): use that one, or name another file with `answers.store`"
            )
        with database:
            database.execute("BEGIN IMMEDIATE")  # tables alone would begin no transaction
            if version == 0:
                database.execute(_CREATE)
            if version < VERSION:
                database.execute(_CREATE_ITEMS)
                database.execute(_INDEX_ITEMS)
            database.execute(f"PRAGMA user_version = {VERSION}")

    def _loaded(self, stored: Stored) -> Stored:
        if isinstance(stored, StoredConversation):
            key = (stored.owner, stored.id)
            found = self._database.execute(_ITEMS, key) if self._is_prepared else ()
            self._rows[key] = rows = [(packed_before(item), seq) for seq, item in found]
            stored.items += [item for item, _ in rows]  # behind those of an older entry, if it is
            stored.items_bytes = items_bytes(stored.items)
        return stored

    async def _write(self, batch: Mapping[Key, _Write | None]) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._write_now, batch)

    def _write_now(self, batch: Mapping[Key, _Write | None]) -> None:
        rows: dict[Key, Rows] = {}
        if not self._is_prepared:
            self._prepare()
            self._is_prepared = True
        with self._database as database:
            for key, write in batch.items():
                if write is None:
                    database.execute(_DELETE, key)
                    database.execute(_DELETE_ITEMS, key)
                    continue
                database.execute(_PUT, (*key, write.encode()))
                if write.items or key in self._rows:
                    rows[key] = self._write_items(key, write.items)
        for key in batch:
            self._rows.pop(key, None)
        self._rows |= rows

    def _write_items(self, key: Key, items: Sequence[PackedItem]) -> Rows:
        """Write what is new of a conversation, and remove what is gone; return what is there."""
        database, todo = self._database, difference(self._rows.get(key, []), items)
        database.executemany(_DELETE_ITEM, [(seq,) for seq in todo.gone])
        rows = todo.kept
        for item in todo.new:
            seq = database.execute(_ADD_ITEM, (*key, item.packed)).lastrowid
            assert seq is not None, "a row was inserted"
            rows.append((item, seq))
        return rows
