"""What running generations have produced and nobody has looked at yet.

One task per generation reads its events as they come and stamps them; the reader of `Arrivals`
takes everything that is there in one go. So a slow client gets bigger chunks instead of a queue of
small ones, and waiting costs neither a task per token nor a poll. What can pile up is bounded by
the requests' max_tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from coordinator.generation import Generation
from pdserve.clock import Clock
from pdserve.protocol import TokenEvent


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event, of which generation, and when it came."""

    index: int
    event: TokenEvent
    at_s: float


class Arrivals:
    """The merged events of several generations. Has one reader, who closes it."""

    def __init__(self, generations: Sequence[Generation], clock: Clock) -> None:
        self._clock = clock
        self._ready: list[Arrival] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._num_running = len(generations)  # readers whose end has been taken note of come off
        self._stopped: set[int] = set()
        self._readers: dict[int, asyncio.Task[None]] = {}
        for index, generation in enumerate(generations):
            reader = asyncio.create_task(self._read(index, generation))
            self._readers[index] = reader
            reader.add_done_callback(partial(self._reader_done, index))

    @property
    def is_exhausted(self) -> bool:
        """Whether every generation has ended and everything was taken."""
        return not self._ready and self._num_running == 0

    async def take(self, timeout_s: float | None = None) -> list[Arrival]:
        """Everything that has arrived, in order, waiting for something if need be.

        Empty when the time is over, or when there is nothing to wait for any more. A generation's
        error is raised after everything that arrived before it has been taken.
        """
        if not self._ready and self._error is None and not self.is_exhausted:
            await self._wait(timeout_s)
        taken, self._ready = self._ready, []
        if not taken and self._error is not None:
            raise self._error
        return taken

    async def stop(self, index: int) -> None:
        """Read no more of this generation; how it ends does not matter."""
        self._stopped.add(index)
        reader = self._readers[index]
        reader.cancel()
        await asyncio.wait([reader])

    async def close(self) -> None:
        """Read no more at all."""
        self._stopped.update(self._readers)
        for reader in self._readers.values():
            reader.cancel()
        await asyncio.wait(self._readers.values())

    async def _read(self, index: int, generation: Generation) -> None:
        async for event in generation:
            self._ready.append(Arrival(index, event, self._clock.now()))
            self._wake()

    def _reader_done(self, index: int, reader: asyncio.Task[None]) -> None:
        self._num_running -= 1
        error = None if reader.cancelled() else reader.exception()
        if index not in self._stopped:
            self._error = self._error or error
        if self._error is not None or self.is_exhausted:
            self._wake()

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
