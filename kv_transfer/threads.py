"""Threads that copy bytes, and how the event loop waits for them without leaving one behind.

The safety of the whole KV transfer rests on this: a job's future ends only after its thread has
left the native loop. So when `run` has returned or raised, also by cancellation, nothing accesses
the memory any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """Wait for it, and return its result. When cancelled, this raises only after it has ended."""
    ended = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        await wait_ended(ended)
        raise


async def wait_ended(ended: asyncio.Future[Any]) -> None:
    """Wait until it has a result or an error, which is not raised, whoever cancels this.

    For one that is being cancelled already, and re-raises that.
    """
    while not ended.done():
        with suppress(asyncio.CancelledError):  # it cannot hurry what this waits for
            await asyncio.wait({ended})
    if not ended.cancelled():
        ended.exception()  # marks it as retrieved


# Copied in about 80 microseconds; waking a thread and being woken by it takes twice as long.
INLINE_BYTES = 1 << 20
_MAX_TURNS = 4  # in which a copy may be done on the event loop, of INLINE_BYTES each
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


class CopyJob(Protocol):
    """A native copy that can be done in pieces."""

    def __call__(self, cancel: NDArray[np.uint8], start: int, max_bytes: int) -> int:
        """Copy at most `max_bytes` from position `start` on; returns the position reached."""
        ...


class CopyThreads:
    """A small thread pool for native jobs that release the interpreter lock.

    Jobs must end soon after their flag is set, and must not wait long for a peer: while a thread
    waits, it is not available to others.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._is_taking_turns = False

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
            future.cancel()  # if the job has not started, it never will
            await wait_ended(ended)
            raise

    async def move(self, job: Callable[[], T], cancel: CancelFlag, num_bytes: int) -> T:
        """As `run`, but a small job, which must not wait for anything, runs on the event loop."""
        if num_bytes <= INLINE_BYTES:
            return job()
        return await self.run(job, cancel)

    async def copy(self, job: CopyJob, num_bytes: int) -> None:
        """Copy `num_bytes` bytes: on a thread, or on the event loop if they are few.

        The event loop copies at most INLINE_BYTES at a time. Between these turns others run, but
        only one copy takes several turns, so that many at once do not hold up the loop. When
        cancelled, nothing is written any more once this has raised.
        """
        cancel = CancelFlag()
        if num_bytes > _MAX_TURNS * INLINE_BYTES or (
            num_bytes > INLINE_BYTES and self._is_taking_turns
        ):
            await self.run(partial(job, cancel.byte, 0, num_bytes), cancel)
            return
        position = job(cancel.byte, 0, INLINE_BYTES)
        if position == num_bytes:
            return
        self._is_taking_turns = True
        try:
            while position < num_bytes:
                await asyncio.sleep(0)
                position = job(cancel.byte, position, INLINE_BYTES)
        finally:
            self._is_taking_turns = False

    def close(self) -> None:
        """End the threads; no job may be running."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def together(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run them at the same time, and return their results.

    Ends when all of them have, also by the error of one or when cancelled. No asyncio.TaskGroup:
    one that waits for the others after an error forgets that it is cancelled meanwhile, and leaves
    its task counted as being cancelled, so that no deadline around it would be known as one.
    """
    if len(jobs) < 2:
        return [await job for job in jobs]
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        over, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await to_its_end(asyncio.gather(*tasks, return_exceptions=True))
    for task in over:
        task.result()  # raises the first error
    return [task.result() for task in tasks]
