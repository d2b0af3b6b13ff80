"""How long a thread was runnable but had no core to run on, as counted by Linux."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SCHEDSTAT = "/proc/thread-self/schedstat"  # ns running, ns waiting for a core, time slices


@contextmanager
def core_waits() -> Iterator[Callable[[], float]]:
    """Yields a function that returns how long the calling thread has waited so far, in seconds.

    A call takes a microsecond, because the file is kept open. On kernels without this count the
    function returns 0.
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
