"""Starts a backend of a benchmark, waits until it serves, and ends all of its processes."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass

import aiohttp

from pdserve.commands.bench.serve.backend import Backend
from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.ports import ReservedPort
from pdserve.shared.process.exit_codes import FAILED, StartFailed

_HOST = "127.0.0.1"
_TICK_S = 0.2  # between two looks whether it serves
_REPLY_S = 5.0
_END_S = 15.0  # from SIGTERM to SIGKILL
_NOT_THERE = 404


@dataclass(frozen=True, slots=True)
class Started:
    """A server that is ready."""

    url: str
    pid: int | None  # of it and of its process group; None: it was not started here


@asynccontextmanager
async def running(
    backend: Backend,
    places: Mapping[str, str],
    start_s: float,
    tell: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[Started]:
    """Yield a server that is ready; one that is started here ends with the context.

    From then on SIGTERM and SIGHUP end this process as Ctrl-C does: servers would outlive it.

    Args:
        backend: who it is.
        places: values of the names in its command, besides {port}.
        start_s: deadline until it is ready.
        tell: called with what is being done.

    Raises:
        StartFailed: it cannot be started, ended before it was ready, or was not ready in time.
    """
    if backend.url:
        yield Started(backend.url, None)
        return
    with closing(ReservedPort(_HOST)) as reserved:
        port = reserved.port  # free from now on: not every server could listen on a reserved one
    argv = backend.argv({**places, "port": str(port)})
    tell(shlex.join(argv))
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, signal.raise_signal, signal.SIGINT)
    try:
        child = Child(backend.name, argv, lambda name, line: None, lambda end: None)
    except OSError as error:
        raise StartFailed(f"{backend.name} cannot be started: {error}", FAILED) from error
    try:
        await _wait_ready(f"http://{_HOST}:{port}", child, start_s)
        yield Started(f"http://{_HOST}:{port}", child.pid)
    finally:
        await _end(child)


async def _wait_ready(url: str, child: Child, start_s: float) -> None:
    looking, ending = asyncio.create_task(_look(url)), asyncio.create_task(child.ended())
    try:
        done, _ = await asyncio.wait(
            [looking, ending], timeout=start_s, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        looking.cancel()
        ending.cancel()
    if ending in done:
        end = ending.result()
        raise StartFailed(
            f"{child.name} ended with {end.cause} before it was ready: {end.last_line}", FAILED
        )
    if looking not in done:
        raise StartFailed(f"{child.name} was not ready within {start_s:g} s (--start-s)", FAILED)
    looking.result()


async def _look(url: str) -> None:
    """Return when the server lists its models and, if it has a /health, is healthy."""
    limit = aiohttp.ClientTimeout(total=_REPLY_S)
    async with aiohttp.ClientSession(timeout=limit) as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):  # it does not listen yet
                statuses = []
                for path in ("/v1/models", "/health"):
                    async with session.get(url + path) as response:
                        statuses.append(response.status)
                if statuses[0] == 200 and statuses[1] in (200, _NOT_THERE):
                    return
            await asyncio.sleep(_TICK_S)


async def _end(child: Child) -> None:
    """End the child and its process group: what it has started must not use the cores later.

    SIGKILL is sent even if waiting is interrupted.
    """
    try:
        _signal_group(child, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await child.ended()
    finally:
        _signal_group(child, signal.SIGKILL)
    await child.ended()


def _signal_group(child: Child, number: signal.Signals) -> None:
    """Send a signal to a child's process group, if anybody is left in it."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)
