"""Waits until a cluster, or a part of it, is ready, or one of its processes has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from pdserve.commands.cluster.child import Exit, Process
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.protocol.status import ClusterStatus
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.exit_codes import FAILED, StartFailed

Look: TypeAlias = Callable[[], Awaitable[ClusterStatus]]  # asks; may raise ClusterError

_TICK_S = 0.1  # between two requests for /status


async def wait_until(
    is_ready: Callable[[ClusterStatus], bool],
    look: Look,
    processes: Sequence[Process],
    within_s: float,
) -> None:
    """Poll the status of a cluster until `is_ready` returns True.

    Raises:
        StartFailed: one of `processes` ended first, or `within_s` passed.
    """
    looking = asyncio.create_task(_look_until(is_ready, look))
    endings = [asyncio.create_task(process.ended()) for process in processes]
    try:
        done, _ = await asyncio.wait(
            [looking, *endings], timeout=within_s, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        for task in (looking, *endings):
            task.cancel()
    for ending in endings:
        if ending in done:
            raise _ended_early(ending.result())
    if looking not in done:
        raise await _too_late(look, [process.name for process in processes], within_s)
    looking.result()


async def _look_until(is_ready: Callable[[ClusterStatus], bool], look: Look) -> None:
    while True:
        try:
            status = await look()
        except ClusterError:  # the coordinator does not listen yet
            pass
        else:
            if is_ready(status):
                return
        await asyncio.sleep(_TICK_S)


async def _too_late(look: Look, names: Sequence[str], within_s: float) -> StartFailed:
    try:
        status = await look()
        missing = status.waiting_for([name for name in names if name != COORDINATOR])
    except ClusterError as error:
        missing = str(error)
    return StartFailed(f"the cluster was not ready within {within_s:g} s (start_s): {missing}")


def _ended_early(end: Exit) -> StartFailed:
    return StartFailed(
        f"{end.name} ended with {end.cause} before the cluster was ready: {end.last_line}",
        end.returncode if end.returncode > 0 else FAILED,
    )
