"""The requests being answered, so that a server can stop without cutting them off."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress


class InFlight:
    """Tasks that answer a request, or make what was asked for in the background."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self.draining = asyncio.Event()  # for whoever is in flight only to wait for work
        self._is_aborting = False

    @property
    def is_draining(self) -> bool:
        """Whether no new request is admitted."""
        return self.draining.is_set()

    @property
    def is_aborting(self) -> bool:
        """Whether a cancellation is ours and not due to a client that went away."""
        return self._is_aborting

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The current task answers a request."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def start(self, making: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """A task that goes on when its request has been answered."""
        task = asyncio.create_task(making)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, grace_s: float) -> None:
        """Admit nothing new and wait for what runs, but no longer than `grace_s`."""
        self.draining.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._tasks:  # a request may leave a task behind
                    await asyncio.wait(self._tasks)

    async def abort(self, timeout_s: float) -> None:
        """End what still runs; each gets to tell its client."""
        self._is_aborting = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
