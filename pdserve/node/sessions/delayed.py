"""Messages of a session that arrive late, and in order: those over a simulated link."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec


class Delayed:
    """Gives every message to `receive`, `delay_s` seconds after it was sent."""

    def __init__(self, receive: Callable[[msgspec.Struct], None], delay_s: float) -> None:
        self._receive = receive
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._on_the_way: deque[tuple[float, msgspec.Struct]] = deque()  # with their arrival

    def send(self, message: msgspec.Struct) -> None:
        """As Sender.send."""
        arrival_s = self._loop.time() + self._delay_s
        self._on_the_way.append((arrival_s, message))
        if len(self._on_the_way) == 1:
            self._loop.call_at(arrival_s, self._arrive)

    def _arrive(self) -> None:
        """Receive what is due; one timer at a time, since equal ones may come in any order."""
        now_s = self._loop.time()
        while self._on_the_way and self._on_the_way[0][0] <= now_s:
            self._receive(self._on_the_way.popleft()[1])
        if self._on_the_way:
            self._loop.call_at(self._on_the_way[0][0], self._arrive)
