"""The daily pattern of arrivals in a file, so that a restarted coordinator still knows it.

Written every few minutes by a thread, as a whole, and read once at the start. It is a forecast and
nothing more: a file that cannot be read or written costs the pattern, and is told in the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from coordinator.admission.arrivals import Arrivals, Pattern

log = logging.getLogger(__name__)

SAVE_S: Final = 120.0
_MOST_BYTES: Final = 4 << 20  # several times what the most classes take


class ArrivalFile:
    """Keeps the pattern of one model."""

    def __init__(
        self, path: Path, arrivals: Arrivals, time_s: Callable[[], float] = time.time
    ) -> None:
        """`time_s`: seconds since 1970, by which times of the day are found again."""
        self._path = path
        self._arrivals = arrivals
        self._time_s = time_s
        self._is_told = False  # that it cannot be written

    def load(self, now_s: float) -> None:
        """Go on with the pattern that the file has; `now_s` by the clock of the arrivals."""
        try:
            if self._path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES} bytes")
            pattern = msgspec.json.decode(self._path.read_bytes(), type=Pattern)
            self._arrivals.go_on(pattern, now_s, self._time_s())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:  # msgspec's are ValueErrors
            log.warning("the daily pattern of arrivals begins anew: %s: %s", self._path, error)

    def save(self, pattern: Pattern) -> None:
        """Replace the file."""
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            new.write_bytes(msgspec.json.encode(pattern))
            new.replace(self._path)
        except OSError as error:
            if not self._is_told:
                log.warning("the daily pattern of arrivals cannot be kept: %s", error)
            self._is_told = True
        else:
            self._is_told = False

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Save now and then meanwhile, and at the end."""

        async def keep() -> None:
            while True:
                await asyncio.sleep(SAVE_S)
                await asyncio.to_thread(self.save, self._arrivals.pattern(self._time_s()))

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            self.save(self._arrivals.pattern(self._time_s()))
