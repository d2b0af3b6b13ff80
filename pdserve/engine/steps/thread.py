"""The thread that computes steps, so that the event loop can run during a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from pdserve._native import Watchdog
from pdserve.shared.process.thread_name import ENGINE_THREAD, name_this_thread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Computation(Generic[T]):
    """A function submitted to the thread, and its progress."""

    compute: Callable[[], T]
    begun: asyncio.Future[None]  # set as soon as the thread starts on it
    result: asyncio.Future[T]  # its result, or the exception it raised


class StepThread:
    """Runs functions one after the other for an event loop.

    Work is submitted through a queue, and results return as event loop callbacks, without locks in
    Python code. An executor's futures, chained to those of the loop, take several times as long.
    """

    def __init__(self) -> None:
        """Start the thread. Must be created, used and closed on one running event loop.

        It is a daemon thread, so an idle one does not keep the process alive.
        """
        self._loop = asyncio.get_running_loop()
        self._work: SimpleQueue[Computation[Any] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=ENGINE_THREAD, daemon=True)
        self._thread.start()
        assert self._thread.ident is not None, "it has been started"
        assert self._thread.native_id is not None
        clock = time.pthread_getcpuclockid(self._thread.ident)
        self.watchdog = Watchdog(self._thread.native_id, clock)  # looks once it is started

    def submit(self, compute: Callable[[], T]) -> Computation[T]:
        """Run a function in the thread.

        Callers should await `begun` before doing other work on the loop. Work done before that
        delays the thread, because both need the interpreter lock; soon afterwards the thread no
        longer does.
        """
        computation = Computation(compute, self._loop.create_future(), self._loop.create_future())
        self.watchdog.expect()
        self._work.put(computation)
        return computation

    @property
    def is_alive(self) -> bool:
        """Whether it can still compute something, now or later."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Wait for the submitted work to finish, and end the thread."""
        self._work.put(None)
        self._thread.join()
        self.watchdog.stop()

    def _run(self) -> None:
        name_this_thread(ENGINE_THREAD)
        tell = self._loop.call_soon_threadsafe
        while (work := self._work.get()) is not None:
            tell(_settle, work.begun, None)
            try:
                result = work.compute()
            except BaseException as error:  # noqa: BLE001  pass on any exception to the waiter
                tell(_fail, work.result, error)
            else:
                tell(_settle, work.result, result)
            self.watchdog.done()


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # it is done if the waiter was cancelled
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # futures reject it: it would end the waiting coroutine
        stopped, error = error, RuntimeError("an iterator was exhausted")
        error.__cause__ = stopped
    future.set_exception(error)
