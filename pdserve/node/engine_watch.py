"""Finds out that a node's engine has died or is stuck, which nobody else would say.

It is stuck when a step has run for many times as long as predicted, or when its thread stands still
though it has something to do. As in `pdserve.wire.patience`, only time in which this process ran is
counted: in ticks that came in time. So neither a process that was stopped nor a machine that was
too busy to tick makes a step seem long.

A thread that stands still may hold the interpreter's lock, and then nothing here runs. So native
code looks (`csrc/threads/watchdog.h`), and ends the process if nothing here has done it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from pdserve._native import Watchdog
from pdserve.engine.engine import Engine
from pdserve.engine.interface import shape_of
from pdserve.engine.prompt_results.results import is_scored
from pdserve.engine.request import Scheduled
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import Sickness
from pdserve.shared.clock import Clock
from pdserve.shared.errors import NodeSick
from pdserve.shared.process.exit_codes import SICK

T = TypeVar("T")

TICK_S = 0.25
FACTOR = 10.0  # of the predicted time: a machine shared with others may be several times as slow
FLOOR_S = 5.0  # added to it, for what no profile knows; and for a thread that stands still
SILENT_S = 1.0  # later, native code ends a process whose interpreter has not done it
# The same where predictions are a guess that has not been tried yet, where prompts are scored (what
# no profile has measured), and on GPUs, where a step compiles the kernels that are needed for the
# first time in it.
LONG_FLOOR_S = 60.0
_WRITE_STACKS = signal.SIGRTMIN  # of no other use: has the process write where its threads are


@dataclass(slots=True)
class _Step:
    """What an engine computed at the last look."""

    rows: Sequence[Scheduled] | None = None
    lasts_s: float = 0.0  # since it was first seen


class EngineWatch:
    """Watches a node's engines while the node waits for something else."""

    def __init__(
        self,
        engines: Sequence[Engine],
        running: asyncio.Future[None],
        perf: PerfModel,
        clock: Clock,
        *,
        compiles: bool,
        lost_rank: Callable[[], str] | None = None,
    ) -> None:
        """Nothing is watched yet.

        Args:
            engines: of the node, with threads, since it has loaded its model.
            running: their loops, which never end by themselves.
            perf: predicts its steps.
            clock: that of `perf` and of the event loop.
            compiles: its steps may compile kernels.
            lost_rank: which of its ranks has ended; empty: none. None: it has no others.
        """
        self._steps = {engine: _Step() for engine in engines}
        self._running = running
        self._perf = perf
        self._clock = clock
        self._compiles = compiles
        self._lost_rank = lost_rank
        self._due_s = clock.now() + TICK_S
        if compiles or lost_rank is not None:
            return  # threads stand still, for others that compute
        faulthandler.register(_WRITE_STACKS)
        for engine in engines:
            engine.started_thread().watchdog.start(TICK_S, FLOOR_S + SILENT_S, SICK, _WRITE_STACKS)

    async def until(self, *events: Coroutine[Any, Any, object]) -> None:
        """Wait for the first of these events.

        Raises:
            NodeSick: as `look`.
        """
        waits = [asyncio.ensure_future(event) for event in events]
        watched: set[asyncio.Future[Any]] = {self._running, *waits}
        try:
            while not any(wait.done() for wait in waits):
                await asyncio.wait(watched, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                self.look()
        finally:
            for wait in waits:
                wait.cancel()

    def look(self) -> None:
        """Look once.

        Raises:
            NodeSick: its loop, its thread or a rank has ended, or its step takes too long.
        """
        if self._lost_rank is not None and (lost := self._lost_rank()):
            raise NodeSick(f"{Sickness.RANK_LOST}: {lost}")
        now_s = self._clock.now()
        in_time = now_s < self._due_s + TICK_S
        self._due_s = now_s + TICK_S
        if self._running.done():
            raise _sickness(self._running.exception())
        for engine, seen in self._steps.items():
            if not engine.has_thread:
                raise NodeSick(f"{Sickness.ENGINE_DEAD}: the thread that computes steps has ended")
            self._check_thread(engine.started_thread().watchdog)
            step = engine.step
            if step is not seen.rows:
                self._steps[engine] = _Step(step)
            elif step is not None and in_time:
                seen.lasts_s += TICK_S
                self._check_time(step, seen.lasts_s)

    def _check_thread(self, watchdog: Watchdog) -> None:
        """However long it may take, a thread with something to do runs; also on a busy machine."""
        if (still_s := watchdog.still_s) > FLOOR_S:
            sick = _stuck(f"its thread has not run for {still_s:.1f} s, though it has work to do")
            watchdog.stop()  # who hears of it ends the process, and tells others first
            raise sick

    def _check_time(self, step: Sequence[Scheduled], lasts_s: float) -> None:
        shape = shape_of(step)
        predicted_s = self._perf.step_s(shape)
        is_known = self._perf.is_known(shape) and not self._compiles and not is_scored(step)
        if lasts_s > FACTOR * predicted_s + (FLOOR_S if is_known else LONG_FLOOR_S):
            raise _stuck(
                f"a step of {len(step)} requests has not ended for {lasts_s:.1f} s, "
                f"{predicted_s:.3g} s were predicted"
            )


async def unless_rank_lost(
    loading: Awaitable[T],
    lost_rank: Callable[[], str],
    end_sick: Callable[[NodeSick], Awaitable[NoReturn]],
) -> T:
    """Wait for what loads with other ranks: on a GPU, it may wait for ever for one that has ended.

    Args:
        loading: returns what has been loaded.
        lost_rank: which rank has ended; empty: none.
        end_sick: ends the process.
    """
    task = asyncio.ensure_future(loading)
    while not task.done():
        await asyncio.wait({task}, timeout=TICK_S)
        if lost_rank() and not task.done():
            await asyncio.wait({task}, timeout=TICK_S)  # on CPUs it ends by itself
            if not task.done():
                await end_sick(NodeSick(f"{Sickness.RANK_LOST}: {lost_rank()}"))
    return await task


def _stuck(why: str) -> NodeSick:
    """Return that an engine is, and write where."""
    faulthandler.dump_traceback()  # of every thread
    return NodeSick(f"{Sickness.ENGINE_STUCK}: {why}")


def _sickness(error: BaseException | None) -> NodeSick:
    """Return what an engine's loop that has ended with this error means."""
    if isinstance(error, NodeSick):
        return error
    sick = NodeSick(f"{Sickness.ENGINE_DEAD}: its loop ended with {error!r}")
    sick.__cause__ = error
    return sick
