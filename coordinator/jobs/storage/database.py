"""A database as jobs use it: a few statements at a time, each time one transaction.

Tenants have turns at it, and no transaction is long: what one has to be done delays that of another
by one transaction of each tenant at most.
Statements have `?` for parameters. {NOW} is the database's own time in seconds since 1970, so that
leases of several coordinators need no common clock; {BLOB} is the type of bytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sqlite3
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeAlias, TypeVar

from coordinator.stateful.storage.shared.link import DEADLINE_S, MAX_CONNECTIONS, DatabaseLink
from pdserve.shared.carry_out import carry_out
from pdserve.shared.errors import StoreUnavailable
from pdserve.shared.fair_share import Turns
from pdserve.shared.process.may_pass import config_error, has_no_room

_log = logging.getLogger(__name__)

T = TypeVar("T")
_Call: TypeAlias = tuple[Future[Any], Callable[[], Any]]
Row: TypeAlias = tuple[Any, ...]
Step: TypeAlias = tuple[Any, ...]  # a statement and its parameters
MAX_BYTES = 16 << 30
MAX_MEMORY_BYTES = 256 << 20  # without a file
_BUSY_S = 5.0
_PRAGMAS = (
    "auto_vacuum = FULL",  # the file shrinks as files are deleted
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "secure_delete = ON",
)
_LOCK = 0x7064736A  # of the tables while they are made


class Database(Protocol):
    """One database, for one or several coordinators."""

    is_shared: bool  # other coordinators may use it meanwhile
    max_bytes: int  # of files and lines, of all tenants; one has at most half of it

    async def run(self, *steps: Step, is_guarded: bool = False, owner: str = "") -> list[list[Row]]:
        """Run the steps as one transaction, when it is their owner's turn; return the rows of each.

        If it `is_guarded` and the first step has no row, the others are not run. Without an `owner`
        they are the coordinator's own.

        Raises StoreUnavailable.
        """
        ...

    async def close(self) -> None:
        """Close it, once what runs has ended."""
        ...


class FairThread:
    """A thread that tenants take turns at, of one call each; it takes the next call by itself."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "jobs")
        # Tenant |-> its waiting calls; the tenant whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[_Call]] = OrderedDict()
        self._lock = Lock()  # of what waits

    async def run(self, owner: str, call: Callable[[], T]) -> T:
        """Make a call when it is the turn of its tenant."""
        answer: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((answer, call))
        self._executor.submit(self._next)  # one for each call, whichever it makes
        return await asyncio.wrap_future(answer)

    def shutdown(self) -> None:
        """End it, once all calls are made."""
        self._executor.shutdown()

    def _next(self) -> None:
        with self._lock:
            owner, calls = self._waiting.popitem(last=False)
            answer, call = calls.popleft()
            if calls:
                self._waiting[owner] = calls  # at the end
        carry_out(call, answer)


class SqliteDatabase:
    """A file of this coordinator's, or memory."""

    is_shared = False

    def __init__(self, path: Path | None, schema: Sequence[str]) -> None:
        """Open the file, or create it. Raises ConfigError."""
        self._schema: Sequence[str] = schema  # empty once it is made
        self.max_bytes = MAX_MEMORY_BYTES if path is None else MAX_BYTES
        self._thread = FairThread()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it has what users wrote
            where = ":memory:" if path is None else path
            self._database = sqlite3.connect(where, timeout=_BUSY_S, check_same_thread=False)
        except (sqlite3.Error, OSError) as error:
            raise config_error(f"cannot keep batches in {path}: {error}", error) from error
        try:
            self._prepare()
        except sqlite3.Error as error:  # a full disk keeps no coordinator from starting
            if not has_no_room(error):
                self._database.close()
                raise config_error(f"cannot keep batches in {path}: {error}", error) from error
            _log.error("batches cannot be kept now: %s: %s", path, error)

    async def run(self, *steps: Step, is_guarded: bool = False, owner: str = "") -> list[list[Row]]:
        """See Database."""
        try:
            return await self._thread.run(owner, partial(self._run, steps, is_guarded))
        except (sqlite3.Error, RuntimeError) as error:
            raise StoreUnavailable(f"batches cannot be kept now: {error}") from error

    async def close(self) -> None:
        """See Database."""
        await self._thread.run("", self._database.close)
        self._thread.shutdown()

    def _prepare(self) -> None:
        if not self._schema:
            return
        for pragma in _PRAGMAS:
            self._database.execute(f"PRAGMA {pragma}")
        with self._database as database:
            for statement in self._schema:
                database.execute(_of_sqlite(statement))
        self._schema = ()

    def _run(self, steps: Sequence[Step], is_guarded: bool) -> list[list[Row]]:
        found: list[list[Row]] = []
        self._prepare()
        with self._database as database:
            for sql, *given in steps:
                found.append(database.execute(_of_sqlite(sql), given).fetchall())
                if is_guarded and not found[0]:
                    break
        return found


class PostgresDatabase:
    """A database of all coordinators."""

    is_shared = True
    max_bytes = MAX_BYTES

    def __init__(self, url: str, schema: Sequence[str]) -> None:
        """Raises ConfigError: the URL is wrong."""
        self._link = DatabaseLink(url)
        self._turns = Turns(MAX_CONNECTIONS)
        self._schema: Sequence[str] = schema  # empty once it is made
        self._making = asyncio.Lock()

    async def run(self, *steps: Step, is_guarded: bool = False, owner: str = "") -> list[list[Row]]:
        """See Database."""
        await self._make()
        found: list[list[Row]] = []
        async with self._turn(owner), self._link.transaction() as connection:
            for sql, *given in steps:
                rows = await connection.fetch(_of_postgres(sql), *given)
                found.append([tuple(row) for row in rows])
                if is_guarded and not found[0]:
                    break
        return found

    async def close(self) -> None:
        """See Database."""
        await self._link.close()

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._turns.take(owner)
        except TimeoutError as error:
            raise StoreUnavailable("the database of batches is too slow now") from error
        try:
            yield
        finally:
            self._turns.pass_on()

    async def _make(self) -> None:
        async with self._making:
            if not self._schema:
                return
            async with self._link.transaction() as connection:
                await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
                for statement in self._schema:
                    await connection.execute(_of_postgres(statement))
            self._schema = ()


@cache
def _of_sqlite(sql: str) -> str:
    now = "((julianday('now') - 2440587.5) * 86400.0)"
    return sql.replace("{NOW}", now).replace("{BLOB}", "blob").replace("bigint", "integer")


@cache
def _of_postgres(sql: str) -> str:
    now = "extract(epoch FROM clock_timestamp())::float8"
    parts = re.split(r"\?", sql.replace("{NOW}", now).replace("{BLOB}", "bytea"))
    numbered = [f"${number}{part}" for number, part in enumerate(parts[1:], 1)]
    return "".join([parts[0], *numbered])
