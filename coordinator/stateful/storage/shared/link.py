"""Connections to the database, made when they are needed, each with deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from coordinator.stateful.storage.shared import tables
from pdserve.shared.errors import ConfigError, StoreUnavailable
from pdserve.shared.hints.extras import how_to_install

if TYPE_CHECKING:
    import asyncpg
    from asyncpg.pool import PoolConnectionProxy

    Connection = PoolConnectionProxy[asyncpg.Record]

log = logging.getLogger(__name__)

DEADLINE_S: Final = 5.0  # of one statement, and of getting a connection
MAX_CONNECTIONS: Final = 4  # the writer's, and some that read


class DatabaseLink:
    """The connections of one coordinator.

    Args:
        url: postgresql://USER@HOST/DATABASE; the rest from where libpq takes it: PGPASSWORD,
            PGPASSFILE, PGSSLMODE and so on.

    Raises:
        ConfigError: the URL is malformed or has a password, or asyncpg is not installed.
    """

    def __init__(self, url: str) -> None:
        self.name = _checked(url)
        self._url = url
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._opening = asyncio.Lock()
        self._listener: asyncpg.Connection[asyncpg.Record] | None = None

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Lend a connection. Raises StoreUnavailable, also for errors within."""
        import asyncpg

        try:
            async with asyncio.timeout(DEADLINE_S):
                pool = await self._opened()
                connection = await pool.acquire()
            try:
                yield connection
            finally:
                await pool.release(connection, timeout=DEADLINE_S)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            log.debug("%s: %s", self.name, why)
            raise StoreUnavailable("the database of stored responses cannot be used now") from error

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Lend a connection for one transaction. Raises StoreUnavailable."""
        async with self.connection() as connection, connection.transaction():
            yield connection

    async def listen(self, heard: Callable[[str], None]) -> None:
        """Have `heard` called with what others `notify`, unless it is so already.

        Raises StoreUnavailable.
        """
        import asyncpg

        if self._listener is not None and not self._listener.is_closed():
            return
        try:
            listener = await asyncpg.connect(
                self._url, timeout=DEADLINE_S, command_timeout=DEADLINE_S
            )
            try:
                await listener.add_listener(tables.CHANNEL, lambda *told: heard(str(told[-1])))
            except BaseException:  # cancelled, too: nobody else would close it
                listener.terminate()
                raise
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
            raise StoreUnavailable(f"cannot listen at {self.name}: {error}") from error
        self._listener = listener

    async def close(self) -> None:
        """Close all connections."""
        if self._listener is not None:
            self._listener.terminate()
        if self._pool is not None:
            self._pool.terminate()

    async def _opened(self) -> asyncpg.Pool[asyncpg.Record]:
        import asyncpg

        async with self._opening:
            if self._pool is None:
                pool = await asyncpg.create_pool(
                    self._url,
                    min_size=0,
                    max_size=MAX_CONNECTIONS,
                    timeout=DEADLINE_S,
                    command_timeout=DEADLINE_S,
                )
                try:
                    await _prepare(pool)
                except BaseException:  # cancelled, too: nobody else would close it
                    pool.terminate()
                    raise
                self._pool = pool
            return self._pool


async def _prepare(pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Make the tables, unless they are there, or take over older ones."""
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", tables.LOCK)
        await connection.execute(tables.VERSIONS)
        version = await connection.fetchval("SELECT version FROM pdserve_schema")
        if version is not None and version > tables.VERSION:
            raise OSError(
                f"its tables have schema {version}, and this pdserve knows {tables.VERSION}: use "
                "the newer pdserve, or another database"
            )
        if version == 1:
            await connection.execute(tables.FROM_1)
        await connection.execute(tables.SCHEMA)
        if version is None:
            await connection.execute("INSERT INTO pdserve_schema VALUES ($1)", tables.VERSION)
        await connection.execute("UPDATE pdserve_schema SET version = $1", tables.VERSION)


def may_be_id(text: str) -> bool:
    """Return whether a text could be an id; a database cannot even look for some that are none."""
    return text.isascii() and text.isprintable()


def _checked(url: str) -> str:
    """Return the URL's host and database, for people to read. Raises ConfigError."""
    try:
        import asyncpg  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "`answers.store` names a PostgreSQL database, which needs asyncpg: "
            f"{how_to_install('postgres')}"
        ) from error
    try:
        parts = urlsplit(url)
        if parts.password is not None:
            raise ConfigError(
                "`answers.store` has a password, which others could read there: give it in "
                "PGPASSWORD, or in the file that PGPASSFILE names"
            )
        return f"{parts.hostname or 'localhost'}:{parts.port or 5432}{parts.path}"
    except ValueError as error:
        raise ConfigError(f"`answers.store` is not a URL of a database: {error}") from error
