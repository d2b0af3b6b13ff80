"""A lock between processes, acquired with a deadline. It is released if its holder dies."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_LOOK_S = 0.25  # interval between calls of `while_waiting`


@contextmanager
def file_lock(path: Path, wait_s: float, while_waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock within the context. Yields False if the deadline passed without getting it.

    Args:
        path: of the lock file, which is created if needed and not removed.
        wait_s: how long to wait for another holder.
        while_waiting: called now and then; may raise to abort.

    Raises:
        OSError: the file cannot be created or locked.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiter = _Waiter(file)  # it is responsible for closing the file from here on
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
    """Waits for a lock with a deadline. flock has none, so a thread calls it and sets an event."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._mutex = threading.Lock()
        self._is_wanted = True
        self._is_held = threading.Event()
        threading.Thread(target=self._lock, name="file-lock", daemon=True).start()

    def wait(self, wait_s: float, while_waiting: Callable[[], None]) -> bool:
        """Wait for the lock; return whether it was acquired in time."""
        end_s = time.monotonic() + wait_s
        while not self._is_held.wait(min(_LOOK_S, max(0.0, end_s - time.monotonic()))):
            while_waiting()
            if time.monotonic() >= end_s:
                return False
        return True

    def leave(self) -> None:
        """Release the lock, now or as soon as the thread acquires it."""
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
