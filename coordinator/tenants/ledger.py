"""The usage of each key by the hour, and what tenants owe to their rate limits, in SQLite.

Amounts are added up in memory and written once a second by a dedicated thread, so no request waits
for a disk. A coordinator that is killed loses at most the last second. What cannot be written, for
instance since the disk is full, is kept and written later.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from pdserve.shared.process.may_pass import config_error, has_no_room

log = logging.getLogger(__name__)

FLUSH_S = 1.0
HOUR_S = 3600
_BUSY_S = 5.0  # another coordinator may be writing to the same file

_CREATE = """
CREATE TABLE IF NOT EXISTS usage (
    hour INTEGER NOT NULL, tenant TEXT NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
    PRIMARY KEY (hour, tenant, key_id, model)
) WITHOUT ROWID
"""
_CREATE_OWED = """
CREATE TABLE IF NOT EXISTS owed (
    tenant TEXT PRIMARY KEY, requests REAL NOT NULL, tokens REAL NOT NULL, at REAL NOT NULL
) WITHOUT ROWID
"""
_OWE = "INSERT OR REPLACE INTO owed VALUES (?, ?, ?, ?)"
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests, failed = failed + excluded.failed,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    output_tokens = output_tokens + excluded.output_tokens
"""


class Account(NamedTuple):
    """The key under which usage is added up."""

    hour: int  # since 1970
    tenant: str
    key_id: str
    model: str


class Amounts(NamedTuple):
    """The used amounts of one account."""

    requests: int = 0
    failed: int = 0  # of the requests
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt_tokens
    output_tokens: int = 0

    def plus(self, other: Amounts) -> Amounts:
        """Return the sum of both."""
        return Amounts(*(a + b for a, b in zip(self, other, strict=True)))


class Owed(NamedTuple):
    """What is missing from a tenant's full buckets."""

    requests: float
    tokens: float
    at_s: float  # since 1970


class Ledger:
    """Adds usage to one SQLite file until it is closed."""

    def __init__(self, path: Path, flush_s: float = FLUSH_S, busy_s: float = _BUSY_S) -> None:
        """Open the file, or create it. What is added is written every `flush_s`.

        Raises:
            ConfigError: the file cannot be written, or is not an SQLite database.
        """
        self._path = path
        self._flush_s = flush_s
        self._busy_s = busy_s
        self._owed: dict[str, Owed] = {}  # at the start
        self._is_behind = False  # the last attempt to write failed; only the writer knows
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._begin()
        except (sqlite3.Error, OSError) as error:
            raise config_error(
                f"cannot keep usage in {path}: {error}: set access.usage_db to a file that can be "
                "written, or to memory to keep none",
                error,
            ) from error
        self._lock = threading.Lock()
        self._pending: dict[Account, Amounts] = {}  # guarded by the lock, as the next one
        self._pending_owed: dict[str, Owed] = {}
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_until_closed, name="usage", daemon=True)
        self._writer.start()

    def add(self, account: Account, amounts: Amounts) -> None:
        """Add the amounts of a finished request; does not wait for the disk."""
        with self._lock:
            self._pending[account] = self._pending.get(account, Amounts()).plus(amounts)

    def owe(self, tenant: str, owed: Owed) -> None:
        """Remember what a tenant owes now; does not wait for the disk."""
        with self._lock:
            self._pending_owed[tenant] = owed

    def owed(self, tenant: str) -> Owed | None:
        """Return what a tenant owed when the last coordinator ended."""
        return self._owed.get(tenant)

    def close(self) -> None:
        """Write pending amounts, and stop the writer thread."""
        self._closing.set()
        self._writer.join()

    def _begin(self) -> None:
        """Make the tables, and read what is owed; a full disk only has all of it wait.

        Raises:
            sqlite3.Error: the file cannot be used.
        """
        try:
            self._write({}, {})
            with connected(self._path, self._busy_s) as database:
                self._owed = _owed_in(database)
        except sqlite3.Error as error:
            if not has_no_room(error):
                raise
            self._tell_behind(error)
            # Else even reading needs room: for memory that it shares with others.
            as_it_is = f"{self._path.absolute().as_uri()}?immutable=1"
            with closing(sqlite3.connect(as_it_is, uri=True)) as database:
                self._owed = _owed_in(database)

    def _tell_behind(self, error: sqlite3.Error) -> None:
        if not self._is_behind:  # it is tried every second: one line is enough
            log.error("usage cannot be written, and is kept in memory: %s: %s", self._path, error)
        self._is_behind = True

    def _write_until_closed(self) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(self._flush_s)
            self._flush()
        if self._pending:
            num_requests = sum(amounts.requests for amounts in self._pending.values())
            log.error("the usage of %d requests is lost: see above", num_requests)

    def _flush(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
            owed, self._pending_owed = self._pending_owed, {}
        if not (pending or owed):
            return
        try:
            self._write(pending, owed)
        except sqlite3.Error as error:
            self._tell_behind(error)
            for account, amounts in pending.items():
                self.add(account, amounts)
            with self._lock:
                self._pending_owed = owed | self._pending_owed
        else:
            if self._is_behind:
                log.info("usage is written again: %s", self._path)
            self._is_behind = False

    def _write(self, pending: Mapping[Account, Amounts], owed: Mapping[str, Owed]) -> None:
        with connected(self._path, self._busy_s) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(_CREATE)  # each time: the file may have been moved away
            database.execute(_CREATE_OWED)
            database.executemany(_OWE, [(tenant, *owed[tenant]) for tenant in owed])
            database.executemany(_ADD, [(*account, *used) for account, used in pending.items()])


def _owed_in(database: sqlite3.Connection) -> dict[str, Owed]:
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'owed'").fetchone():
        return {}
    rows = database.execute("SELECT tenant, requests, tokens, at FROM owed")
    return {tenant: Owed(*owed) for tenant, *owed in rows}


@contextmanager
def connected(path: Path, busy_s: float = _BUSY_S) -> Iterator[sqlite3.Connection]:
    """Open a connection; it is committed at the end unless an error is raised, and then closed."""
    with closing(sqlite3.connect(path, timeout=busy_s)) as database, database:
        yield database
