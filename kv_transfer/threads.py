"""The few threads that move bytes, and how the event loop waits for them without ever leaving one.

The fence of the whole KV transfer is here: a job's future ends only when its thread is out of the
native loop, so whoever awaited `run` - to its end, an error or a cancellation - knows that nothing
touches the memory any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import numpy as np

T = TypeVar("T")

# Moved in some fifty microseconds; waking a thread takes as long, and longer beside a busy model.
INLINE_BYTES = 512 << 10
_SLICE_S = 0.05  # how long one transfer may hold a thread before the others get a turn


def slice_s(num_bytes: int) -> float:
    """How long a native socket loop of a transfer of this size may run at a go."""
    return 0.0 if num_bytes <= INLINE_BYTES else _SLICE_S


class CancelFlag:
    """One-way stop button of one transfer; native loops look at `byte` every few megabytes."""

    __slots__ = ("byte",)

    def __init__(self) -> None:
        self.byte = np.zeros(1, dtype=np.uint8)

    def set(self) -> None:
        """Stop. From any thread."""
        self.byte[0] = 1


class CopyThreads:
    """A small thread pool for native jobs that release the interpreter lock.

    Jobs must end soon after their flag is set, and never wait long for a peer: a thread that waits
    is one that nobody else has.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, job: Callable[[], T], cancel: CancelFlag) -> T:
        """The job's result or error. When this is cancelled, sets the flag and waits for the end.

        Raises:
            RuntimeError: the threads are closed.
        """
        future = self._executor.submit(job)
        ended = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            cancel.set()
            await _wait_for_end(future, ended)
            raise

    async def move(self, job: Callable[[], T], cancel: CancelFlag, num_bytes: int) -> T:
        """As `run`, but a small job, which must not wait for anything, runs here and now."""
        if num_bytes <= INLINE_BYTES:
            return job()
        return await self.run(job, cancel)

    def close(self) -> None:
        """End the threads; no job may be running."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def _wait_for_end(future: Future[T], ended: asyncio.Future[T]) -> None:
    future.cancel()  # a job that has not begun never will
    while not ended.done():
        # A second cancellation cannot hurry the thread; the first is on its way up already.
        with suppress(asyncio.CancelledError):
            await asyncio.wait({ended})
    if not ended.cancelled():
        ended.exception()  # or it would be reported as one that nobody has looked at
