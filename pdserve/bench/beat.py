"""The steps of an engine that does not exist: a clock that calls at even times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Beat:
    """Calls its listeners every `step_s`, from `start` on.

    One that got behind takes up the beat again from where it is: a late engine does not make up for
    steps that it has missed.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._listeners: list[Callable[[], None]] = []

    def listen(self, on_step: Callable[[], None]) -> None:
        """Call `on_step` at every step."""
        self._listeners.append(on_step)

    def start(self) -> None:
        """Begin; it goes on as long as the running event loop does."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._schedule(loop.time() + self.step_s)

    def _schedule(self, due_s: float) -> None:
        self._loop.call_at(due_s, self._step, due_s)

    def _step(self, due_s: float) -> None:
        for on_step in self._listeners:
            on_step()
        self._schedule(max(due_s + self.step_s, self._loop.time()))
