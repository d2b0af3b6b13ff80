"""How long a thread could have run, but had no core: Linux counts it for every thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SCHEDSTAT = "/proc/thread-self/schedstat"  # ns on a core, ns waiting for one, time slices


@contextmanager
def core_waits() -> Iterator[Callable[[], float]]:
    """Within it, a function for the calling thread: seconds of waiting so far.

    It takes a microsecond, because the file stays open. On a kernel that does not count, always 0.
    """
    try:
        file = os.open(_SCHEDSTAT, os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9
    finally:
        os.close(file)
