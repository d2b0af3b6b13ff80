"""An event loop whose time is virtual, and the processes that share it.

When nothing is ready, time jumps to the next timer. So a life takes no longer than its callbacks,
and happens the same way each time. A callback belongs to the process in whose context it runs; a
process that is stopped runs none, as after SIGSTOP, or for good.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any
from weakref import WeakSet

START_S = 1000.0
THREAD_S = 0.03  # what is done in another thread takes
MOST_AT_ONCE = 200_000  # callbacks without time passing: something goes round in circles

PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class NothingLeft(Exception):
    """Everybody waits for somebody else."""


class Process:
    """Some tasks, timers and callbacks that run, or are stopped, together."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.is_stopped = False
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.context = Context()
        self.context.run(PROCESS.set, self)
        self._loop = loop
        self._parked: list[asyncio.Handle] = []

    def __repr__(self) -> str:
        return self.name

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function in this process, when it runs."""
        self._loop.call_soon(function, *args, context=self.context)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task in this process."""
        return self._loop.create_task(work, context=self.context)

    def stop(self) -> None:
        """Run nothing from now on."""
        self.is_stopped = True

    def park(self, handle: asyncio.Handle) -> None:
        """Keep what would have run until the process goes on."""
        self._parked.append(handle)

    def go_on(self) -> None:
        """Run again, what is overdue first."""
        self.is_stopped = False
        parked, self._parked = self._parked, []
        self._loop.resume(parked)


class VirtualLoop(asyncio.BaseEventLoop):
    """See above. It has neither threads nor sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.num_callbacks = 0
        self._now_s = START_S
        self._num_now = 0
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._now_s

    def resume(self, handles: list[asyncio.Handle]) -> None:
        """Run these next."""
        self._ready.extend(handles)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., Any], *args: object
    ) -> asyncio.Future[Any]:
        """As if a thread did it: in the process that asks, after a while, and all at once."""
        done = self.create_future()

        def run() -> None:
            try:
                result = function(*args)
            except Exception as error:  # noqa: BLE001  what it raises is its result
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self.call_later(THREAD_S, run)
        return done

    def timers_of(self, process: Process) -> list[asyncio.TimerHandle]:
        """The timers that the process has set."""
        return [
            timer
            for timer in self._scheduled
            if not timer.cancelled() and timer._context.get(PROCESS) is process
        ]

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
            self._timer_cancelled_count -= 1
        if not ready:
            if not scheduled:
                raise NothingLeft
            if scheduled[0]._when > self._now_s:
                self._now_s, self._num_now = scheduled[0]._when, 0
        while scheduled and scheduled[0]._when <= self._now_s:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            ready.append(timer)
        self._num_now += len(ready)
        if self._num_now > MOST_AT_ONCE:
            raise NothingLeft(f"it goes round in circles at {self._now_s}: {list(ready)[:5]}")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and process.is_stopped:
                process.park(handle)
            else:
                self.num_callbacks += 1
                handle._run()

    def _write_to_self(self) -> None:
        """There is no other thread that could wake it."""

    def _process_events(self, event_list: object) -> None:
        raise AssertionError("there are no sockets")


def _make_task(
    loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None
) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, context=context)
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks.add(task)
    return task
