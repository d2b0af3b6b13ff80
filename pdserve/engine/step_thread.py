"""The one thread that computes steps, so that the event loop goes on while a step runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Computation(Generic[T]):
    """What the thread was given."""

    compute: Callable[[], T]
    begun: asyncio.Future[None]  # set as soon as the thread turns to it
    result: asyncio.Future[T]  # or what it raised


class StepThread:
    """Computes one thing after the other for an event loop.

    Messages go there through a queue, and back as callbacks: no lock that Python code has to take.
    An executor's futures, chained to the loop's, take several times as long.
    """

    def __init__(self) -> None:
        """To be made, used and closed on one running event loop. An idle one keeps no process."""
        self._loop = asyncio.get_running_loop()
        self._work: SimpleQueue[Computation[Any] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, compute: Callable[[], T]) -> Computation[T]:
        """Call it in the thread.

        What the loop does before `begun` is set, it does in the thread's way: both need the
        interpreter lock then, and the thread soon no more.
        """
        computation = Computation(compute, self._loop.create_future(), self._loop.create_future())
        self._work.put(computation)
        return computation

    def close(self) -> None:
        """Wait for what was submitted, and end the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        tell = self._loop.call_soon_threadsafe
        while (work := self._work.get()) is not None:
            tell(_settle, work.begun, None)
            try:
                result = work.compute()
            except BaseException as error:  # noqa: BLE001  whoever waits is told, whatever it is
                tell(_fail, work.result, error)
            else:
                tell(_settle, work.result, result)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # nobody waits any more
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # a future takes no such error: its waiter would end by it
        stopped, error = error, RuntimeError("an iterator was exhausted")
        error.__cause__ = stopped
    future.set_exception(error)
