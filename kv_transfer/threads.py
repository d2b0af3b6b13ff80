"""Threads that copy bytes, and how the event loop waits for them without leaving one behind.

The safety of the whole KV transfer rests on this: a job's future ends only after its thread has
left the native loop. So when `run` has returned or raised, also by cancellation, nothing accesses
the memory any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import numpy as np

T = TypeVar("T")

# Copied in about 50 microseconds; waking a thread takes as long, and longer beside a busy model.
INLINE_BYTES = 512 << 10
_SLICE_S = 0.05  # how long a transfer may hold a thread before others get a turn


def slice_s(num_bytes: int) -> float:
    """How long a native socket loop may run without interruption, for a transfer of this size."""
    return 0.0 if num_bytes <= INLINE_BYTES else _SLICE_S


class CancelFlag:
    """Stops one transfer; native loops check `byte` every few megabytes."""

    __slots__ = ("byte",)

    def __init__(self) -> None:
        self.byte = np.zeros(1, dtype=np.uint8)

    def set(self) -> None:
        """Stop the transfer. May be called from any thread."""
        self.byte[0] = 1


class CopyThreads:
    """A small thread pool for native jobs that release the interpreter lock.

    Jobs must end soon after their flag is set, and must not wait long for a peer: while a thread
    waits, it is not available to others.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, job: Callable[[], T], cancel: CancelFlag) -> T:
        """Run the job on a thread. When cancelled, this sets the flag and waits for the job to end.

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
        """As `run`, but a small job, which must not wait for anything, runs on the event loop."""
        if num_bytes <= INLINE_BYTES:
            return job()
        return await self.run(job, cancel)

    def close(self) -> None:
        """End the threads; no job may be running."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def _wait_for_end(future: Future[T], ended: asyncio.Future[T]) -> None:
    future.cancel()  # if the job has not started, it never will
    while not ended.done():
        # A second cancellation cannot hurry the thread; the caller re-raises the first one.
        with suppress(asyncio.CancelledError):
            await asyncio.wait({ended})
    if not ended.cancelled():
        ended.exception()  # marks it as retrieved
