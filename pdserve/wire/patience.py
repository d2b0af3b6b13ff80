"""Deadlines for what a peer says, which count only time in which this process could have heard it.

A process that was stopped, or whose machine was, wakes up with every deadline passed, and with all
that its peers have said in the meantime unread. So silence is counted in ticks of the event loop,
and a tick that comes late is not counted: what is pending is read before the next one. Beyond the
limit a peer may be waited for still, as long as there are signs that it lives (`lifeline.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdserve.shared.clock import Clock, SystemClock

_TICKS = 10  # per deadline: a peer is given up within a tenth of the deadline after it


def _never(silent_s: float) -> bool:
    """The default of whether a peer is waited for beyond the limit."""
    return False


class Patience:
    """How long a peer has been silent, in ticks that came in time."""

    def __init__(
        self, limit_s: float, clock: Clock, waits_on: Callable[[float], bool] = _never
    ) -> None:
        """`waits_on` says whether a peer that has been silent for so long is still waited for."""
        self.tick_s = limit_s / _TICKS
        self._clock = clock
        self._waits_on = waits_on
        self._num_ticks = 0
        self._due_s = clock.now() + self.tick_s

    @property
    def silent_s(self) -> float:
        """How long it has been by now."""
        return self._num_ticks * self.tick_s

    def heard(self) -> None:
        """The peer has said something."""
        self._num_ticks = 0

    def tick(self) -> bool:
        """Count the tick that was due, unless it is late; return whether patience is at an end."""
        now_s = self._clock.now()
        is_late = now_s >= self._due_s + self.tick_s
        self._due_s = now_s + self.tick_s
        if is_late:
            return False
        self._num_ticks += 1
        return self._num_ticks >= _TICKS and not self._waits_on(self.silent_s)


@asynccontextmanager
async def patience(
    limit_s: float, clock: Clock | None = None, waits_on: Callable[[float], bool] = _never
) -> AsyncIterator[Patience]:
    """As asyncio.timeout, for waiting for a peer; `heard` begins the time anew.

    Raises:
        TimeoutError: the peer was silent for `limit_s` of the time in which this process ran, and
            `waits_on` says no.
    """
    loop = asyncio.get_running_loop()
    counted = Patience(limit_s, clock or SystemClock(), waits_on)
    timer: asyncio.TimerHandle | None = None

    def tick() -> None:
        nonlocal timer
        if counted.tick():
            timeout.reschedule(loop.time())
        else:
            timer = loop.call_later(counted.tick_s, tick)

    async with asyncio.timeout(None) as timeout:
        timer = loop.call_later(counted.tick_s, tick)
        try:
            yield counted
        finally:
            if timer is not None:
                timer.cancel()
