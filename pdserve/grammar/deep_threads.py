"""Threads with a stack large enough for any grammar of the maximum size.

The library follows rules and references recursively: a chain of a few thousand overflows an
ordinary stack and crashes the process. A large stack only uses memory as deep as it has been used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_STACK_BYTES = 512 << 20
_STARTING = threading.Lock()  # the size of stacks is a setting of the whole process


class DeepThreads:
    """A thread pool with deep stacks. ThreadPoolExecutor starts its threads in `submit`."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a thread of the pool."""
        with _STARTING:
            before_bytes = threading.stack_size(_STACK_BYTES)
            try:
                return self._pool.submit(work)
            finally:
                threading.stack_size(before_bytes)

    def retire(self) -> None:
        """Accept no more work; the threads end when what has been submitted is done."""
        self._pool.shutdown(wait=False)

    def abandon(self) -> None:
        """Accept no more work, and cancel work that has not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)
