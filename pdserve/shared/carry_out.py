"""A job that one thread does for another, which has a future of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def carry_out(job: Callable[[], T], future: Future[T]) -> None:
    """Run the job, unless its future is cancelled, and set the future's result or exception."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001 - passed on to the waiting side
        future.set_exception(error)
    else:
        future.set_result(result)
