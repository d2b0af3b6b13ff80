"""Starts the processes of a cluster again when they end, whatever ended them.

Each process has a back-off of its own: 0.2 s, then twice as long each time, up to 10 s. One that
was ready for a minute begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from pdserve.commands.cluster.supervisor import Cluster
from pdserve.shared.clock import Clock, SystemClock
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.exit_codes import StartFailed

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

    `say` is called with a sentence about each end, and each process that is ready again.
    """

    def __init__(
        self, cluster: Cluster, say: Callable[[str], None], clock: Clock | None = None
    ) -> None:
        self._cluster = cluster
        self._say = say
        self._clock = clock or SystemClock()
        self._backoffs: dict[str, Backoff] = {}

    async def run(self) -> NoReturn:
        """Restart what ends, until cancelled; then nothing is started any more."""
        async with asyncio.TaskGroup() as group:
            while True:
                end = await self._cluster.next_exit()
                self._backoffs.setdefault(end.name, Backoff(self._clock))
                group.create_task(self._restart(end.name, f"{end.told}; starting it again"))

    async def _restart(self, name: str, told: str) -> None:
        backoff = self._backoffs[name]
        while not self._cluster.is_running(name):  # somebody else may have started it
            pause_s = backoff.ended()
            self._say(f"{told} in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)
            if self._cluster.is_retired(name):
                return
            try:
                on_standby = self._cluster.begins_on_standby(name)
                await self._cluster.start_node(name, on_standby=on_standby)
            except OSError as error:  # the system cannot have another process now
                told = f"{name} cannot be started: {error}; trying again"
            except StartFailed as error:  # it has ended, which `run` hears too, or is not ready yet
                if self._cluster.is_running(name):
                    self._say(str(error))
                return
            except ClusterError:  # somebody else has started it, who says so
                return
            else:
                backoff.is_ready()
                self._say(f"{name} is ready again")
                return
