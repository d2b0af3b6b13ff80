"""Watches an event loop: how late it is, and what holds it up.

Everything that a process promises depends on its event loop coming round: tokens, heartbeats,
deadlines. A beat on the loop measures how late timers fire. A thread looks whether the beat has
stopped and then logs where the loop's thread is, which no code on the loop could, and whether it
only waited for a core: that is the host's doing, and what the thread was at says nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

log = logging.getLogger(__name__)

BEAT_S = 0.02
STALL_S = 0.25  # a beat this late is worth a stack in the log
_LOOK_S = 0.05
_QUIET_S = 10.0  # between two stacks: a loop that is stalled all the time must not fill the disk
_WINDOW_S = 60.0


def core_wait_s(thread: int) -> float:
    """Seconds in which a thread of this process was ready to run, and had no core; 0: not known."""
    try:
        told = Path(f"/proc/self/task/{thread}/schedstat").read_text()
    except OSError:  # the thread has ended, or the kernel keeps no such account
        return 0.0
    return int(told.split()[1]) / 1e9


class LoopWatch:
    """Watches the running event loop while its context is open.

    It needs about 70 short wake-ups a second, and the interpreter lock to look: while native code
    holds that, the stack is logged late and may show what came after.
    """

    def __init__(self, waited_s: Callable[[int], float] = core_wait_s) -> None:
        """`waited_s`: how long a thread has waited for cores, by its id."""
        self._waited_s = partial(waited_s, threading.get_native_id())
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._due_s = time.monotonic()  # of the next beat
        self._longest_s = self._longest_before_s = 0.0  # in this half window, and in the last one
        self._half_s = self._due_s
        self._timer: asyncio.TimerHandle | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="loop-watch", daemon=True)

    def __enter__(self) -> LoopWatch:
        self._set()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._due_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join()

    def longest_lag_s(self) -> float:
        """Return the longest lag of about the last minute, in seconds; also one not over yet."""
        lag_s = max(0.0, time.monotonic() - self._due_s)
        return max(lag_s, self._longest_s, self._longest_before_s)

    # ---- on the loop ---------------------------------------------------------------------------

    def _set(self) -> None:
        self._due_s = time.monotonic() + BEAT_S
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s - self._half_s > _WINDOW_S / 2:
            self._half_s, self._longest_before_s, self._longest_s = now_s, self._longest_s, 0.0
        self._longest_s = max(self._longest_s, now_s - self._due_s)
        self._set()

    # ---- in the thread -------------------------------------------------------------------------

    def _look(self) -> None:
        told_s, told_due_s, beat_due_s, before_s = -_QUIET_S, 0.0, 0.0, 0.0
        looked_s = time.monotonic()
        while not self._closing.wait(_LOOK_S):
            now_s, due_s = time.monotonic(), self._due_s
            lag_s, slept_s, looked_s = now_s - due_s, now_s - looked_s - _LOOK_S, now_s
            if due_s != beat_due_s:  # the loop has come round
                beat_due_s, before_s = due_s, self._waited_s()
            if lag_s < STALL_S or due_s == told_due_s or now_s - told_s < _QUIET_S:
                continue
            told_s, told_due_s = now_s, due_s
            waited_s = self._waited_s() - before_s
            self._tell(lag_s, _cause(lag_s, waited_s, is_late_too=slept_s > STALL_S / 2))

    def _tell(self, lag_s: float, cause: str) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        log.warning(
            "the event loop has been stuck for %.2f s%s:\n%s",
            lag_s,
            cause,
            stack,
        )


def _cause(lag_s: float, waited_s: float, *, is_late_too: bool) -> str:
    if waited_s > lag_s / 2:
        return f" (for {waited_s:.2f} s of that it was ready to run, and the host gave it no core)"
    if is_late_too:
        return (
            " (so was the thread that watches it: the process did not run, or native code held the "
            "interpreter; the stack may be of what came after)"
        )
    return ""
