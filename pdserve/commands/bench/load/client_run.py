"""A run of a client: what it observed, and whether the client itself kept up."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from pdserve.commands.bench.load.outcome import Outcome

_TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class Run:
    """The observations of one run."""

    outcomes: list[Outcome]  # in the order of the requests
    lags_s: list[float]  # lag of the client's clock at each of its ticks
    elapsed_s: float
    cpu_s: float  # CPU time of the client

    @property
    def core_share(self) -> float:
        """CPU share of the client, in cores."""
        return self.cpu_s / self.elapsed_s


@dataclass(slots=True)
class Timer:
    """The times of a run that is under way."""

    start_s: float
    start_cpu_s: float
    lags_s: list[float] = field(default_factory=list)  # grows meanwhile

    def run_of(self, outcomes: list[Outcome]) -> Run:
        """Return the run, which ends now."""
        elapsed_s = time.perf_counter() - self.start_s
        return Run(outcomes, self.lags_s, elapsed_s, time.process_time() - self.start_cpu_s)


@asynccontextmanager
async def timed() -> AsyncIterator[Timer]:
    """Yield a timer that runs until the end."""
    with without_garbage_collection():
        timer = Timer(time.perf_counter(), time.process_time())
        ticking = asyncio.create_task(_tick(timer.lags_s))
        try:
            yield timer
        finally:
            ticking.cancel()
            await asyncio.wait((ticking,))


async def _tick(lags_s: list[float]) -> None:
    """Record the clock's lag at each tick, until cancelled."""
    while True:
        due_s = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lags_s.append(time.perf_counter() - due_s)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, whose pauses would be attributed to the server."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
