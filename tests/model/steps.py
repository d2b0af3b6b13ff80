"""An event loop that a test moves: round by round, and through time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

MAX_ROUNDS = 1000


class SteppedLoop(asyncio.SelectorEventLoop):
    """Runs nothing by itself; its time stands still until it is advanced."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def round(self) -> None:
        """One iteration: every task that can go on does so, up to where it waits next."""
        self.call_soon(self.stop)
        self.run_forever()

    def do(self, call: Callable[[], object]) -> None:
        """Call something that needs a running loop."""
        self.call_soon(call)
        self.round()

    def advance(self, seconds: float) -> None:
        """What is due by then happens."""
        self.now_s += seconds
        self.round()

    def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, as soon as it has one."""
        task = self.create_task(work)
        for _ in range(MAX_ROUNDS):
            if task.done():
                return task.result()
            self.round()
        raise AssertionError(f"{work} does not end")
