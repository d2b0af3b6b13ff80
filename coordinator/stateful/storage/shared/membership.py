"""Which coordinators live. What a dead one was making in the background is claimed by another.

A coordinator says every `beat_s` that it `lives` on for so long; times are the database's. So one
that is frozen, or cut off from the database, is dead to the others, and finds out when it is back:
its responses are another's then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from coordinator.stateful.storage.backing import Key
from coordinator.stateful.storage.shared import tables
from coordinator.stateful.storage.shared.link import DatabaseLink
from pdserve.shared.errors import StoreUnavailable

if TYPE_CHECKING:
    import asyncpg

log = logging.getLogger(__name__)

BEAT_S: Final = 1.0
LIVES_BEATS: Final = 6
_TRIM_BEATS: Final = 60


class Membership:
    """The beat of one coordinator.

    Args:
        heard: called with what others tell about an entry.
        ours: returns the keys of the rows that should name this coordinator the maker.
        looked: called with those of them that do not, and with those that it is to stop making.
        claimed: called with rows of (owner, id, version, entry, is_stopped) that are ours now.
        bounds: on the number of entries of all coordinators, and on their bytes.
    """

    def __init__(
        self,
        link: DatabaseLink,
        coordinator: str,
        *,
        beat_s: float,
        lives: timedelta,
        heard: Callable[[str], None],
        ours: Callable[[], set[Key]],
        looked: Callable[[set[Key], set[Key]], None],
        claimed: Callable[[list[asyncpg.Record]], None],
        bounds: tuple[int, int],
    ) -> None:
        self._link = link
        self._coordinator = coordinator
        self._beat_s = beat_s
        self._lives = lives
        self._heard = heard
        self._ours = ours
        self._looked = looked
        self._claimed = claimed
        self._bounds = bounds
        self._early = asyncio.Event()
        self._is_lost = False
        self._num_beats = 0
        self._beating: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin to live."""
        self._beating = asyncio.create_task(self._live())

    def beat_now(self) -> None:
        """Look before it is time to."""
        self._early.set()

    async def leave(self) -> None:
        """Have others claim at once what this coordinator has not finished."""
        if self._beating is None:
            return
        self._beating.cancel()
        await asyncio.wait([self._beating])
        try:
            async with self._link.connection() as connection:
                await connection.execute(tables.LEAVE, self._coordinator)
        except StoreUnavailable as error:
            log.warning("%s; others wait until we count as dead", error)

    async def _live(self) -> None:
        while True:
            try:
                await self._beat()
                if self._is_lost:
                    log.info("stored responses are there again: %s", self._link.name)
                self._is_lost = False
            except StoreUnavailable as error:
                if not self._is_lost:
                    why = error.__cause__ or error
                    log.error("stored responses are not there: %s: %s", self._link.name, why)
                self._is_lost = True
            self._early.clear()
            try:
                async with asyncio.timeout(self._beat_s):
                    await self._early.wait()
            except TimeoutError:
                continue

    async def _beat(self) -> None:
        await self._link.listen(self._heard)
        async with self._link.connection() as connection:
            await connection.execute(tables.LIVE, self._coordinator, self._lives)
            ours = self._ours()
            rows = await connection.fetch(tables.MADE, self._coordinator)
            made = {(owner, stored_id): is_stopped for owner, stored_id, is_stopped in rows}
            self._looked(ours - made.keys(), {key for key in made if made[key]})
            claimed = await connection.fetch(tables.CLAIM, self._coordinator)
        if claimed:
            self._claimed(claimed)
        if self._num_beats % _TRIM_BEATS == 0:
            await self._trim()
        self._num_beats += 1

    async def _trim(self) -> None:
        """Delete what is beyond the bounds, unless another coordinator does so."""
        async with self._link.transaction() as connection:
            if not await connection.fetchval("SELECT pg_try_advisory_xact_lock($1)", tables.LOCK):
                return
            await connection.execute(tables.FORGET_DEAD)
            for number, num_bytes in await connection.fetch(tables.SIZE):
                if number > self._bounds[0] or num_bytes > self._bounds[1]:
                    await connection.execute(tables.TRIM, *self._bounds)
