"""The SQLite file in which stored responses and conversations survive the coordinator.

All of it is in memory as well (`store.py`), so the file is only read at the start. A dedicated
thread writes; what changes while it writes is one transaction, the next one. An answer that says
that something is stored waits for its transaction (`saved`). A coordinator that is killed loses
nothing that was answered; a machine that loses its power may lose its last moments.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from coordinator.stateful.storage.backing import Backing, Change, Key
from coordinator.stateful.storage.saved_entries import decoded, encoder_of
from coordinator.stateful.storage.stored import Stored
from coordinator.stateful.storage.write_behind import WriteBehind
from pdserve.errors import ConfigError

VERSION: Final = 1  # of the schema; files of newer ones are refused
_BUSY_S: Final = 5.0  # a coordinator that is being restarted may not have ended yet
_CREATE = """
CREATE TABLE entries (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL, id TEXT NOT NULL, entry BLOB NOT NULL,
    UNIQUE (owner, id)
)
"""
_PUT = "INSERT OR REPLACE INTO entries (owner, id, entry) VALUES (?, ?, ?)"
_DELETE = "DELETE FROM entries WHERE owner = ? AND id = ?"

Encode = Callable[[], bytes]  # called by the writer's thread


class StoreFile(Backing):
    """One file, which no other coordinator can open meanwhile."""

    is_durable = True

    def __init__(self, path: Path) -> None:
        """Open the file, or create it.

        Raises:
            ConfigError: it cannot be used; says why.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it has what users have written
            self._database = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
            self._prepare()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"cannot keep stored responses in {path}: {error}; name another file with "
                "`answers.store`, or 'memory' to keep them in memory"
            ) from error
        self._writer = ThreadPoolExecutor(1, "store")
        self._behind: WriteBehind[Encode | None] = WriteBehind(
            str(path), self._write, lambda _, newer: newer
        )  # None: deleted

    def load(self) -> Iterator[Stored]:
        """Raises msgspec.MsgspecError for entries that are not pdserve's."""
        entries = self._database.execute("SELECT owner, id, entry FROM entries ORDER BY seq")
        return (decoded(*entry) for entry in entries)

    def put(self, stored: Stored, change: Change | None = None) -> None:
        """Have an entry written."""
        self._behind.put((stored.owner, stored.id), encoder_of(stored))

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

    def _prepare(self) -> None:
        database = self._database
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA secure_delete = ON")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise ConfigError(
                f"{self._path} was written by a newer pdserve (schema {version}, this one knows "
                f"{VERSION}): use that one, or name another file with `answers.store`"
            )
        with database:
            if version == 0:
                database.execute(_CREATE)
            database.execute(f"PRAGMA user_version = {VERSION}")  # also takes the lock

    async def _write(self, batch: Mapping[Key, Encode | None]) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._write_now, batch)

    def _write_now(self, batch: Mapping[Key, Encode | None]) -> None:
        with self._database as database:
            for key, encode in batch.items():
                if encode is None:
                    database.execute(_DELETE, key)
                else:
                    database.execute(_PUT, (*key, encode()))
