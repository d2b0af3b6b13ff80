"""Puts a life's time, network, threads and secrets in the place of the machine's."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import kv_transfer.puller
from coordinator import service
from pdserve.engine import engine
from pdserve.node import assembly, coordinator_link, coordinators, engine_watch, runtime
from pdserve.node.sessions import client
from pdserve.shared.clock import SystemClock
from tests.lives.grpc_seam import Server, open_channel
from tests.lives.loop import PROCESS, Process
from tests.lives.machine import LifeThread
from tests.lives.network import Network
from tests.lives.node import LifeNode
from tests.lives.transport import Pulls


class ProcessEnded(BaseException):
    """In place of the end of the process."""


def _exit(code: int) -> None:
    process: Any = PROCESS.get()
    process.machine.kill(f"exit code {code}")
    raise ProcessEnded


def _now(_: object = None) -> float:
    return asyncio.get_running_loop().time()


class _InlineThreads:
    """As CopyThreads: jobs take no time, and happen at once."""

    def __init__(self, num_threads: int, name: str) -> None:
        pass

    async def run(self, job: Any, cancel: object) -> Any:
        await asyncio.sleep(0)
        return job()

    async def move(self, job: Any, cancel: object, num_bytes: int) -> Any:
        return job()

    def close(self) -> None:
        """There are no threads."""


async def _look_up(address: str) -> list[str]:
    return [address]


def _listener(network: Network) -> Any:
    async def called(address: str) -> list[Process]:
        return network.listener(address)

    return called


class _NoMetricsServer:
    def __init__(self, *parts: object) -> None:
        pass

    async def start(self, host: str, port: int) -> int:
        return 1

    async def close(self) -> None:
        """It has not been opened."""


@contextmanager
def seams(network: Network, pulls: Pulls, random: Random) -> Iterator[None]:
    """While the context lasts, everything that is made belongs to this life."""
    to_life: list[tuple[Any, str, Any]] = [
        (SystemClock, "now", _now),
        (secrets, "token_hex", lambda n=8: random.randbytes(n).hex()),
        (secrets, "token_bytes", random.randbytes),
        (kv_transfer.puller, "time", SimpleNamespace(perf_counter=_now)),
        (kv_transfer.puller, "CopyThreads", _InlineThreads),
        (coordinator_link, "open_channel", lambda address, *_: open_channel(network, address)),
        (coordinators, "look_up", _look_up),
        (client, "open_channel", lambda address, *_: open_channel(network, address)),
        (client, "called", _listener(network)),
        (client, "lifeline", network.lifeline),
        (service, "caller", lambda peer: [peer]),
        (service, "lifeline", network.lifeline),
        (engine, "StepThread", LifeThread),
        (assembly, "choose_kinds", lambda names, pool: [pulls.kind()]),
        (engine_watch, "faulthandler", SimpleNamespace(dump_traceback=list, register=int)),
        (runtime, "Node", LifeNode),
        (runtime, "Server", lambda *_: Server(network)),
        (runtime, "MetricsServer", _NoMetricsServer),
        (runtime, "LoopWatch", partial(nullcontext, SimpleNamespace(longest_lag_s=float))),
        (runtime, "freeze_loaded_objects", lambda: None),
        (runtime, "end_process_after", lambda seconds, code: None),
        (runtime, "os", SimpleNamespace(_exit=_exit)),
        (runtime, "sys", SimpleNamespace(stderr=SimpleNamespace(write=len, flush=int))),
    ]
    patches = [patch.object(where, name, what) for where, name, what in to_life]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in reversed(patches):
            each.stop()
