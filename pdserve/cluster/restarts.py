"""Starts the processes of a cluster again when they end, whatever ended them.

Each process has a back-off of its own: 0.2 s, then twice as long each time, up to 10 s. One that
was ready for a minute begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from pdserve.clock import Clock, SystemClock
from pdserve.cluster.child import Exit
from pdserve.cluster.supervisor import Cluster
from pdserve.process.exit_codes import StartFailed

FIRST_S = 0.2
MOST_S = 10.0
STABLE_S = 60.0  # ready for so long: what comes now is another fault


class Backoff:
    """How long to wait before one process is started again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next_s = FIRST_S
        self._ready_s: float | None = None  # since when

    def is_ready(self) -> None:
        """The process is ready, for the first time since it was started."""
        self._ready_s = self._clock.now()

    def ended(self) -> float:
        """The process has ended; the pause before its next start."""
        if self._ready_s is not None and self._clock.now() >= self._ready_s + STABLE_S:
            self._next_s = FIRST_S
        self._ready_s = None
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, MOST_S)
        return pause_s


class Restarts:
    """Keeps the processes of a ready cluster running, while `run` does.

    `on_end` is called with each end and the pause before the next start, `on_ready` with the name
    of a process that is ready again.
    """

    def __init__(
        self,
        cluster: Cluster,
        on_end: Callable[[Exit, float], None],
        on_ready: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        self._cluster = cluster
        self._on_end = on_end
        self._on_ready = on_ready
        self._clock = clock or SystemClock()
        self._backoffs: dict[str, Backoff] = {}

    async def run(self) -> NoReturn:
        """Restart what ends, until cancelled; then nothing is started any more."""
        async with asyncio.TaskGroup() as group:
            while True:
                end = await self._cluster.next_exit()
                if end.name not in self._backoffs:
                    self._backoffs[end.name] = Backoff(self._clock)
                pause_s = self._backoffs[end.name].ended()
                self._on_end(end, pause_s)
                group.create_task(self._restart(end.name, pause_s))

    async def _restart(self, name: str, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        if self._cluster.is_running(name):  # somebody else has started it
            return
        try:
            await self._cluster.start_node(name)
        except StartFailed:  # it ended again, which `run` hears too; or it takes very long
            return
        self._backoffs[name].is_ready()
        self._on_ready(name)
