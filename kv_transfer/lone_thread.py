"""A thread for calls that may never return: the waiting side can give up at any time.

CopyThreads are the opposite: there, giving up means to wait for the end first.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from pdserve.shared.carry_out import carry_out

T = TypeVar("T")


class LoneThread:
    """A daemon thread that runs its jobs in order; a stuck job does not delay exit."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job; returns a future for use by another thread."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def start(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run a job; returns a future for the event loop. Cancelling it does not stop the job."""
        ended = asyncio.wrap_future(self.submit(job))
        ended.add_done_callback(_mark_retrieved)
        return ended

    def close(self) -> None:
        """End the thread after the jobs submitted so far. Does not wait."""
        self._jobs.put(None)

    def _run(self) -> None:
        while item := self._jobs.get():
            carry_out(*item)
            del item  # do not keep the job's references until the next one


def _mark_retrieved(ended: asyncio.Future[Any]) -> None:
    """Avoid the warning about an exception that was never retrieved, if nobody waits any more."""
    with suppress(asyncio.CancelledError):
        ended.exception()
