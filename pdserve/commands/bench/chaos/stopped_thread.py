"""Stops one thread of another process, as no signal can: it would stop them all."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from pdserve.shared.errors import ClusterError

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17  # requests of ptrace
_WALL: Final = 0x40000000  # of waitpid: also for threads
_LOOK_S: Final = 0.02
_LETS_GO_S: Final = 10.0  # the end of a large process takes a while


def obstacle() -> str:
    """Why threads of child processes cannot be stopped here; empty: they can."""
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            _ptrace(_SEIZE, child.pid)
        except ClusterError as error:
            return str(error)
        finally:
            child.kill()
    return ""


def find_thread(pid: int, name: str) -> int | None:
    """The thread of a process that was the first to have this name; None: there is none now."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # it has just ended
            if (task / "comm").read_text().strip() == name:
                found.append(int(task.name))
    return min(found, default=None)


async def stopped(thread: int, at_most_s: float) -> None:
    """Stop a thread until its process ends, or for a while. Call it on the main thread.

    However this ends, the thread is no longer stopped.

    Raises:
        ClusterError: this process may not do that, or the thread neither stops nor ends.
    """
    _ptrace(_SEIZE, thread)
    try:
        _ptrace(_INTERRUPT, thread)
        until_s = monotonic() + at_most_s
        while monotonic() < until_s:
            await asyncio.sleep(_LOOK_S)
            if _has_ended(thread):
                return
    finally:
        _let_go(thread)


def _let_go(thread: int) -> None:
    """Have a thread go on, or hear that it has ended: before that, its process is not gone.

    This does not wait in the event loop, where another Ctrl-C would end it.

    Raises:
        ClusterError: it neither stops, as it must before it can go on, nor ends.
    """
    until_s = monotonic() + _LETS_GO_S
    while not _has_ended(thread):
        try:
            _ptrace(_DETACH, thread)
        except ClusterError:  # it has not stopped yet, or is about to end
            if monotonic() >= until_s:
                raise
            sleep(_LOOK_S)
        else:
            return


def _has_ended(thread: int) -> bool:
    """Look once, without waiting."""
    try:
        changed, status = os.waitpid(thread, _WALL | os.WNOHANG)
    except ChildProcessError:  # it is traced no more: its end has been told
        return True
    return changed == thread and not os.WIFSTOPPED(status)


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, thread, None, None) != 0:
        number = ctypes.get_errno()
        raise ClusterError(f"cannot stop thread {thread}: {os.strerror(number)}")
