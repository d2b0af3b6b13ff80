"""SIGTERM, SIGINT and SIGHUP: the first signal drains, the second one ends the process.

A process stops by itself when it is asked to stop now, but not while a thread of it computes or
waits: loading weights, or the last step of a model. So the second signal also sets a deadline,
after which the process is ended whatever its threads are doing. Its peers notice at once, as with
any crash, and its memory is freed by the kernel. (It is the event loop that hears of signals: one
that already hangs needs SIGKILL.)
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Final

NOW_S: Final = 1.0  # from the second signal to the end of the process
FORCED: Final = 128 + signal.SIGINT  # exit code of a process that was ended, as shells report it


class StopSignals:
    """Signal handlers of the running event loop. Once set, an event stays set."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()  # also set by who wants the same without a signal
        self.now = asyncio.Event()
        self.has_heard = False  # of a signal
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._received)

    def _received(self) -> None:
        if self.has_heard and not self.now.is_set():
            self.now.set()
            end_process_after(NOW_S, FORCED)
        self.has_heard = True
        self.drain.set()


def hear_ctrl_c() -> None:
    """Have SIGINT end this process also where a shell has it ignored: in the background.

    Other threads than the main one cannot, and leave it as it is.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_process_after(seconds: float, exit_code: int) -> None:
    """End this process then, whatever its threads are doing, unless it has ended before."""
    deadline = threading.Timer(seconds, os._exit, (exit_code,))
    deadline.daemon = True  # it does not keep a process alive that ends in time
    deadline.start()
