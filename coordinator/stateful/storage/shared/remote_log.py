"""The events of a response that another coordinator makes or has made, read from the tables."""

from __future__ import annotations

import asyncio
from typing import Final

from coordinator.stateful.storage.backing import Key
from coordinator.stateful.storage.shared import tables
from coordinator.stateful.storage.shared.link import DatabaseLink
from coordinator.stateful.storage.stored import EventLog
from pdserve.shared.errors import StoreUnavailable

_LOOK_S: Final = 1.0  # without being told of anything


class RemoteLog(EventLog):
    """A log that is read while somebody waits for its events."""

    def __init__(self, link: DatabaseLink, key: Key) -> None:
        super().__init__()
        self._link = link
        self.key = key
        self._run = 0
        self._told = asyncio.Event()

    def tell(self) -> None:
        """Have it looked at again."""
        self._told.set()

    async def changed(self, timeout_s: float) -> None:
        """Wait until there may be more, and read it; StoreUnavailable: now, or it is made anew."""
        try:
            async with asyncio.timeout(min(timeout_s, _LOOK_S)):
                await self._told.wait()
        except TimeoutError:
            pass
        await self.read()

    async def read(self) -> None:
        """Read what is new. Raises StoreUnavailable."""
        self._told.clear()
        async with self._link.connection() as connection:
            is_being_made = await connection.fetchval(tables.IS_BEING_MADE, *self.key)
            rows = await connection.fetch(tables.EVENTS, *self.key, self._run, len(self.events))
        for run, first, events in rows:
            if self._run not in (0, run) and self.events:
                raise StoreUnavailable(
                    "the coordinator that made the response was lost, and another one makes it "
                    "again: stream it again from its beginning"
                )
            self._run = run
            self.add(events[max(0, len(self.events) - first) :])
        if not is_being_made:
            self.close()

    async def closed(self, timeout_s: float) -> None:
        """Wait until the response is not made any more, but no longer than that."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_closed:
                    await self.changed(timeout_s)
        except TimeoutError:
            return
