"""Reads of the prefix store, which must not cost a request more than computing would.

A prompt waits for the store as long as it would have taken to compute what has come, and 1/50 of
its own computation longer. So one that is slow or dead costs no more than that, and not again: who
waits in vain closes the way, until a read that nobody waits for has shown how fast the store is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kv_transfer.lone_thread import LoneThread
from kv_transfer.store.blobs import Blobs
from kv_transfer.store.entry import HEADER_BYTES, Key, check

T = TypeVar("T")

READERS: Final = 8  # blocks that are read at a time: a network file system takes a while for each
LOSS: Final = 0.02  # of the time to compute a prompt, for which it may wait in vain

Entry = NDArray[np.uint8]  # with its header


class Patience:
    """How long a prompt waits for blocks."""

    def __init__(self, started_s: float, slack_s: float, compute_s: Callable[[int], float]) -> None:
        """`compute_s`: of so many blocks. Times are the event loop's."""
        self._started_s = started_s
        self._slack_s = slack_s
        self._compute_s = compute_s

    def deadline_s(self, num_read: int) -> float:
        """Until when it waits for another block, given so many."""
        return self._started_s + self._slack_s + self._compute_s(num_read)


class StoreReads:
    """Threads that read. One that hangs is not waited for, and not given anything else."""

    def __init__(self, blobs: Blobs, block_bytes: int) -> None:
        """`block_bytes`: of a block, its companions included."""
        self._blobs = blobs
        self._entry_bytes = HEADER_BYTES + block_bytes
        self._idle = [LoneThread(f"kv-store-{number}") for number in range(READERS)]
        self._places = asyncio.Semaphore(READERS)

    @property
    def is_stuck(self) -> bool:
        """Whether no thread is idle."""
        return not self._idle

    def close(self) -> None:
        """End the threads, without waiting for any."""
        for thread in self._idle:
            thread.close()

    async def read(self, key: Key) -> Entry | None:
        """Return a block's entry; None: the store does not have it. Nobody else has the memory.

        Raises:
            CorruptTransfer: the store has lost what it was given.
            OSError: it cannot be read.
        """
        return await self._run(lambda: self._read(key))

    async def read_in_turn(
        self, keys: Sequence[Key], patience: Patience, take: Callable[[Entry], Awaitable[bool]]
    ) -> bool:
        """Read these, several at a time, and have `take` take each entry, in order.

        Ends early when `take` returns False; or with one that the store does not have, and then
        returns False.

        Raises:
            TimeoutError: the patience has ended.
            CorruptTransfer, OSError: as `read`.
        """
        waiting = deque(keys)
        reading: deque[asyncio.Task[Entry | None]] = deque()
        num_read = 0
        try:
            while waiting or reading:
                while waiting and len(reading) < READERS:
                    reading.append(asyncio.create_task(self.read(waiting.popleft())))
                async with asyncio.timeout_at(patience.deadline_s(num_read)):
                    entry = await reading[0]
                if entry is None:
                    return False
                reading.popleft()
                num_read += 1
                if not await take(entry):
                    break
            return True
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    def _read(self, key: Key) -> Entry | None:
        entry = np.empty(self._entry_bytes, dtype=np.uint8)
        if not self._blobs.read(key.name, entry):
            return None
        check(key, entry)
        return entry

    async def _run(self, job: Callable[[], T]) -> T:
        await self._places.acquire()
        thread = self._idle.pop()
        ended = thread.start(job)
        ended.add_done_callback(lambda _: self._ended(thread))
        return await asyncio.shield(ended)

    def _ended(self, thread: LoneThread) -> None:
        self._idle.append(thread)
        self._places.release()


class Breaker:
    """Whether prompts may wait for the store. Belongs to the event loop."""

    FIRST_S: Final = 1.0
    LAST_S: Final = 60.0

    def __init__(self) -> None:
        self.is_open = False
        self.probe = asyncio.Event()  # set: somebody is to read what nobody waits for
        self._pause_s = self.FIRST_S

    def failed(self) -> None:
        """Let nobody wait any more."""
        self.is_open = True
        self.probe.set()

    async def probed(self, *, well: bool) -> None:
        """Note how such a read went; returns when another one may be made."""
        if well:
            self.is_open, self._pause_s = False, self.FIRST_S
            return
        self.failed()
        pause_s, self._pause_s = self._pause_s, min(self.LAST_S, 2 * self._pause_s)
        await asyncio.sleep(pause_s)
