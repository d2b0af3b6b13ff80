"""Tracks the requests in progress, so that the server can drain them before it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress


class RunningTasks:
    """Tasks that answer requests or generate background responses."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self.draining = asyncio.Event()  # also awaited by idle WebSocket connections
        self._is_aborting = False

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self.draining.is_set()

    @property
    def is_aborting(self) -> bool:
        """Whether tasks are being cancelled by the server, rather than by disconnecting clients."""
        return self._is_aborting

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Register the current task as answering a request, while the context is open."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def start(self, making: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Start and register a task that may outlive its HTTP request."""
        task = asyncio.create_task(making)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, and wait up to `grace_s` for running tasks to finish."""
        self.draining.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._tasks:  # a request may leave a task behind
                    await asyncio.wait(self._tasks)

    async def abort(self, timeout_s: float) -> None:
        """Cancel running tasks; wait up to `timeout_s` while each sends its client an error."""
        self._is_aborting = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
