"""A clock that stands in for an engine: it calls its listeners at even intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Beat:
    """Calls its listeners every `step_s`, from `start` on.

    A beat that is late continues at even intervals from the present: like an engine, it does not
    make up for missed steps.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._listeners: list[Callable[[], None]] = []

    def listen(self, on_step: Callable[[], None]) -> None:
        """Call `on_step` at every step."""
        self._listeners.append(on_step)

    def start(self) -> None:
        """Start the beat; it continues as long as the running event loop does."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._schedule(loop.time() + self.step_s)

    def _schedule(self, due_s: float) -> None:
        self._loop.call_at(due_s, self._step, due_s)

    def _step(self, due_s: float) -> None:
        for on_step in self._listeners:
            on_step()
        self._schedule(max(due_s + self.step_s, self._loop.time()))
