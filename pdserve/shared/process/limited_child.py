"""What a process does that works for others within limits: it answers one line with one line.

The other end is `coordinator/text/limited_process.py`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

import msgspec

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Exits at once if `parent_pid` is not the parent any more: then it has died already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        sys.exit(1)


def answer_lines(answer: Callable[[bytes], msgspec.Struct], cpu_s: float) -> None:
    """Answer each line of stdin until it ends. The kernel ends the process that takes longer."""
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answered = answer(line)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        tell(answered)


def tell(message: msgspec.Struct) -> None:
    """Write an answer, or what comes before them."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def leave_interrupts_to_parent() -> None:
    """Ignore Ctrl-C, which a terminal sends to all processes: this one ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
