"""A thread for calls that may never return: whoever waits for one can walk away.

CopyThreads are the opposite: there, whoever walks away waits for the end first.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoneThread:
    """One daemon thread, which runs its jobs in order; a stuck one does not hold up our exit."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """The job's end, for another thread."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def start(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """The job's end, for the event loop. Cancelling it leaves a job alone that has begun."""
        ended = asyncio.wrap_future(self.submit(job))
        ended.add_done_callback(_look_at)
        return ended

    def close(self) -> None:
        """The thread ends after the jobs it has been given. Does not wait."""
        self._jobs.put(None)

    def _run(self) -> None:
        while item := self._jobs.get():
            carry_out(*item)
            del item  # what the job holds is not kept until the next one


def carry_out(job: Callable[[], T], future: Future[T]) -> None:
    """Run the job, unless its future is cancelled; its end is the future's."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001 - it is the waiting side's
        future.set_exception(error)
    else:
        future.set_result(result)


def _look_at(ended: asyncio.Future[Any]) -> None:
    """Somebody who walked away does not leave an error behind that nobody has looked at."""
    with suppress(asyncio.CancelledError):
        ended.exception()
