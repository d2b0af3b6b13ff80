"""Waits until a cluster, or a part of it, is ready, or one of its processes has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pdserve.cluster.child import Exit, Process
from pdserve.cluster.coordinator_http import Trust
from pdserve.cluster.plan import COORDINATOR
from pdserve.cluster.status import fetch_status
from pdserve.errors import ClusterError
from pdserve.process.exit_codes import FAILED, StartFailed
from pdserve.protocol.status import ClusterStatus

_TICK_S = 0.1  # between two requests for /status


async def wait_until(
    is_ready: Callable[[ClusterStatus], bool],
    url: str,
    processes: Sequence[Process],
    within_s: float,
    trust: Trust = True,
) -> None:
    """Poll the status of the cluster at `url` until `is_ready` returns True.

    Raises:
        StartFailed: one of `processes` ended first, or `within_s` passed.
    """
    looking = asyncio.create_task(_look_until(is_ready, url, trust))
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
        raise await _too_late(url, [process.name for process in processes], within_s, trust)
    looking.result()


async def _look_until(is_ready: Callable[[ClusterStatus], bool], url: str, trust: Trust) -> None:
    while True:
        try:
            status = await fetch_status(url, trust=trust)
        except ClusterError:  # the coordinator does not listen yet
            pass
        else:
            if is_ready(status):
                return
        await asyncio.sleep(_TICK_S)


async def _too_late(url: str, names: Sequence[str], within_s: float, trust: Trust) -> StartFailed:
    try:
        status = await fetch_status(url, trust=trust)
        missing = status.waiting_for([name for name in names if name != COORDINATOR])
    except ClusterError as error:
        missing = str(error)
    return StartFailed(f"the cluster was not ready within {within_s:g} s (start_s): {missing}")


def _ended_early(end: Exit) -> StartFailed:
    return StartFailed(
        f"{end.name} ended with {end.cause} before the cluster was ready: {end.last_line}",
        end.returncode if end.returncode > 0 else FAILED,
    )
