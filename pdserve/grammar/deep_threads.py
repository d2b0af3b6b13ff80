"""Threads with a stack that no grammar of the largest size overflows.

The library follows rules and references by recursion: a chain of a few thousand overflows an
ordinary stack, and takes the process with it. Memory is only taken as deep as a stack has been.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_STACK_BYTES = 512 << 20


class DeepThreads:
    """Like a ThreadPoolExecutor, which starts its threads with `submit`."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have it done."""
        before_bytes = threading.stack_size(_STACK_BYTES)
        try:
            return self._pool.submit(work)
        finally:
            threading.stack_size(before_bytes)

    def abandon(self) -> None:
        """Take nothing more, and do not begin what waits."""
        self._pool.shutdown(wait=False, cancel_futures=True)
