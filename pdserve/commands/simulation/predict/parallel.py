"""Simulations beside each other, one a core."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from pdserve.shared.errors import ClusterError

A = TypeVar("A")
R = TypeVar("R")


def in_parallel(work: Callable[[A], R], asked: Sequence[A]) -> Iterator[R]:
    """Yield the results as they come, of a process a core, which end with this generator.

    A single one is worked out here.

    Raises:
        ClusterError: one of the processes has died.
    """
    if len(asked) == 1:
        yield work(asked[0])
        return
    processes = multiprocessing.get_context("spawn")
    num_workers = min(len(asked), len(os.sched_getaffinity(0)))
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(num_workers, processes, initializer=_end_at_interrupt)
    try:
        for done in as_completed([pool.submit(work, one) for one in asked]):
            yield done.result()
    except BrokenProcessPool as error:
        raise ClusterError("a process that predicts has died; is there memory enough?") from error
    finally:
        for worker in multiprocessing.active_children():
            if worker not in others:
                worker.terminate()
        pool.shutdown(cancel_futures=True)


def _end_at_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
