"""A log that is written as long as somebody takes it, and that nobody waits for.

Who reads a pipe may stop, a terminal may be held, a disk may be full. A process that waited for
them would stand still with all its requests.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Final

MOST_BYTES: Final = 1 << 20  # that are kept meanwhile
_AT_ONCE: Final = select.PIPE_BUF  # what a pipe takes without waiting if it takes anything
_AGAIN_S: Final = 0.05  # a terminal may take something, and not what comes next


class PatientLog:
    """A descriptor as a stream for lines, from any thread.

    What is not taken now is kept, and a thread waits for who takes it.
    """

    encoding = "utf-8"

    def __init__(self, fd: int) -> None:
        self._fd = _own(fd)
        self._kept = bytearray()
        self._num_lost = 0  # lines, since anything was written
        self._lock = threading.Lock()
        self._poll = _polled(self._fd)
        self._waiting: threading.Thread | None = None

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._fd)

    def write(self, lines: str) -> None:
        """Write them now or later, after those before; too many are counted, and the count told."""
        with self._lock:
            self._write()
            encoded = lines.encode(errors="backslashreplace")
            if self._kept and len(self._kept) + len(encoded) > MOST_BYTES:
                self._num_lost += lines.count("\n")
                return
            self._kept += encoded
            if self._write() and self._waiting is None:
                self._waiting = threading.Thread(target=self._wait, name="log", daemon=True)
                self._waiting.start()

    def flush(self) -> None:
        """Write of what is kept as much as is taken now."""
        with self._lock:
            self._write()

    def finish(self, within_s: float) -> None:
        """Wait until all that is kept has been taken, that long at most."""
        with self._lock:
            waiting = self._waiting
        if waiting is not None:
            waiting.join(within_s)

    def _write(self) -> bool:
        """Return whether the rest waits for somebody to take it."""
        while self._kept:
            if not self._poll.poll(0):
                return True
            try:
                num_written = os.write(self._fd, self._kept[:_AT_ONCE])
            except BlockingIOError:
                return True
            except OSError:  # a full disk, or nobody will ever read it
                return False
            del self._kept[:num_written]
            if not self._kept and self._num_lost:
                told = f"pdserve: {self._num_lost} lines of the log were lost: nobody took them\n"
                self._kept += told.encode()
                self._num_lost = 0
        return False

    def _wait(self) -> None:
        """Write what is kept as it is taken."""
        until_taken = _polled(self._fd)
        while True:
            until_taken.poll()  # for as long as it takes: nothing waits for this thread
            with self._lock:
                before = len(self._kept)
                if not self._write():
                    self._waiting = None
                    return
                is_stuck = len(self._kept) == before
            if is_stuck:
                time.sleep(_AGAIN_S)


def _own(fd: int) -> int:
    """Return a descriptor of the same terminal that never waits; of anything else, the same.

    A terminal may take one byte of a write and wait for who reads before it takes the others. Who
    else has this descriptor, a shell, say, expects it to wait.
    """
    try:
        return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # it is none, or has no name here
        return fd


def _polled(fd: int) -> select.poll:
    """One for each thread: it refuses a second one."""
    found = select.poll()
    found.register(fd, select.POLLOUT)
    return found
