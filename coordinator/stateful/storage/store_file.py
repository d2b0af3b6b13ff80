"""The SQLite file in which stored responses and conversations survive the coordinator.

All of it is in memory as well (`store.py`), so the file is only read at the start. A dedicated
thread writes; what changes while it writes is one transaction, the next one. An answer that says
that something is stored waits for its transaction (`saved`). A coordinator that is killed loses
nothing that was answered; a machine that loses its power may lose its last moments.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from pdserve.errors import ConfigError, StoreUnavailable

log = logging.getLogger(__name__)

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

Key = tuple[str, str]  # (owner, id)
Encode = Callable[[], bytes]  # called by the writer's thread


class StoreFile:
    """One file, which no other coordinator can open meanwhile."""

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
        self._pending: dict[Key, Encode | None] = {}  # None: deleted
        self._next: asyncio.Future[None] | None = None  # the end of the transaction to come
        self._running: asyncio.Future[None] | None = None
        self._is_behind = False  # the last transaction failed

    def load(self) -> Iterator[tuple[str, str, bytes]]:
        """Yield (owner, id, entry), the least recently written first."""
        yield from self._database.execute("SELECT owner, id, entry FROM entries ORDER BY seq")

    def put(self, key: Key, encode: Encode) -> None:
        """Have an entry written; it must not change any more."""
        self._pending[key] = encode
        self._begin()

    def delete(self, key: Key) -> None:
        """Have an entry deleted."""
        self._pending[key] = None
        self._begin()

    async def saved(self) -> None:
        """Wait until all that was put or deleted so far is in the file. Raises StoreUnavailable."""
        waits_for = self._next or self._running
        if waits_for is not None:
            await asyncio.shield(waits_for)

    async def close(self) -> None:
        """Write what is still to be written, and close the file."""
        try:
            if self._pending:
                self._begin()
            while self._running is not None:
                await asyncio.wait([self._running])
        finally:
            if self._pending:
                log.error("%d stored entries are lost: see above", len(self._pending))
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

    # ---- on the event loop ---------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin the next transaction once the running one has ended."""
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.create_future()
        if self._running is not None:
            return
        self._running, self._next = self._next, None
        batch, self._pending = self._pending, {}
        writing = loop.run_in_executor(self._writer, self._write, batch)
        writing.add_done_callback(partial(self._over, batch, self._running))

    def _over(
        self,
        batch: dict[Key, Encode | None],
        ended: asyncio.Future[None],
        writing: asyncio.Future[None],
    ) -> None:
        self._running = None
        error = writing.exception()
        if error is None:
            ended.set_result(None)
            if self._is_behind:
                log.info("stored responses are written again: %s", self._path)
            self._is_behind = False
        else:
            self._pending = batch | self._pending  # written with what comes next
            if not self._is_behind:
                log.error("stored responses cannot be written: %s: %s", self._path, error)
            self._is_behind = True
            ended.set_exception(
                StoreUnavailable("what the call stores cannot be written to disk now")
            )
            ended.exception()  # not every transaction is waited for
        if self._next is not None:
            self._begin()

    # ---- on the writer's thread ----------------------------------------------------------------

    def _write(self, batch: Mapping[Key, Encode | None]) -> None:
        with self._database as database:
            for key, encode in batch.items():
                if encode is None:
                    database.execute(_DELETE, key)
                else:
                    database.execute(_PUT, (*key, encode()))
