"""A machine that is never busy: time passes only while a client and its server both wait.

What they do takes a microsecond a turn of the loop. So a promise of 20 ms is kept or broken by what
a test's server does, and by nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from selectors import EpollSelector, SelectorKey
from typing import Any, ParamSpec
from unittest.mock import patch

P = ParamSpec("P")
_ARRIVES_S = 0.002  # real seconds in which a byte has its way over loopback
_TURN_S = 1e-6  # of the loop


def on_an_idle_machine(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in such time; it has no threads, and its processes are this one."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=_IdleLoop) as runner:
            now = runner.get_loop().time
            with patch.object(time, "perf_counter", now), patch.object(time, "monotonic", now):
                runner.run(test(*args, **kwargs))

    return run


class _IdleLoop(asyncio.SelectorEventLoop):
    """When nothing is ready and nothing arrives, time jumps to the next timer."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self.now_s


class _Skipping(EpollSelector):
    def __init__(self, loop: _IdleLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        self._loop.now_s += _TURN_S  # so no timer is early
        if not timeout:
            return super().select(timeout)
        arrived = super().select(_ARRIVES_S)
        if not arrived:
            self._loop.now_s += timeout
        return arrived
