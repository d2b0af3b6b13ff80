"""The text of GET /metrics, made on the event loop without being in anybody's way.

It is made on the loop, since gauges read state that only the loop may touch. All of it takes ten
milliseconds or more, and anybody may ask for it. So it is made piece by piece, each in a turn of
the loop of its own, and it is made at most for a tenth of the time: whoever asks meanwhile shares
the next text with everybody else who does. Nobody gets a text that was begun before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

SHARE: Final = 0.1  # of the loop's time, at most


class Exposition:
    """Makes the text when it is asked for. Used on one event loop."""

    def __init__(
        self,
        pieces: Callable[[], Iterator[bytes]],
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`pieces` yields the pieces of one text, and reads the metrics as it goes."""
        self._pieces = pieces
        self._now = now
        self._sleep = sleep
        self._next: asyncio.Task[bytes] | None = None  # of which nothing has been read yet
        self._turn = asyncio.Lock()  # one text at a time
        self._rests_until_s = 0.0

    async def text(self) -> bytes:
        """Return the text, as it is now or later."""
        if self._next is None:
            self._next = asyncio.create_task(self._make())
        return await asyncio.shield(self._next)  # others may wait for it, too

    async def _make(self) -> bytes:
        async with self._turn:
            await self._sleep(self._rests_until_s - self._now())
            self._next = None  # whoever asks from now on wants to know what happens from now on
            made: list[bytes] = []
            work_s = 0.0
            try:
                pieces = self._pieces()
                while True:
                    began_s = self._now()
                    piece = next(pieces, None)
                    ended_s = self._now()
                    work_s += ended_s - began_s
                    if piece is None:
                        return b"".join(made)
                    made.append(piece)
                    await self._sleep(0)
            finally:
                self._rests_until_s = self._now() + work_s * (1 / SHARE - 1)
