"""A lock between processes, waited for with a deadline. It is free when its holder dies."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_LOOK_S = 0.25  # between two looks whether the lock is still wanted


@contextmanager
def file_lock(path: Path, wait_s: float, while_waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock of this name within; whether it is held, or the deadline has passed instead.

    Args:
        path: of a file that is made if need be, and stays.
        wait_s: how long to wait for somebody else.
        while_waiting: called now and then; may raise, to end it all.

    Raises:
        OSError: the file cannot be made or locked.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiter = _Waiter(file)  # which closes the file now
        try:
            yield waiter.wait(wait_s, while_waiting)
        finally:
            waiter.leave()
        return
    except OSError:
        file.close()
        raise
    with file:
        yield True


class _Waiter:
    """flock has no deadline, so a thread waits in it, which an event has."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._mutex = threading.Lock()
        self._is_wanted = True
        self._is_held = threading.Event()
        threading.Thread(target=self._lock, name="file-lock", daemon=True).start()

    def wait(self, wait_s: float, while_waiting: Callable[[], None]) -> bool:
        """Whether the lock came within that time."""
        end_s = time.monotonic() + wait_s
        while not self._is_held.wait(min(_LOOK_S, max(0.0, end_s - time.monotonic()))):
            while_waiting()
            if time.monotonic() >= end_s:
                return False
        return True

    def leave(self) -> None:
        """Free the lock, or have it freed when it comes."""
        with self._mutex:
            self._is_wanted = False
            if self._is_held.is_set():
                self._file.close()

    def _lock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        with self._mutex:
            self._is_held.set()
            if not self._is_wanted:
                self._file.close()
