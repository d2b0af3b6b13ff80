"""Packed files are synced by a thread in the background; tests wait for it where it matters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(autouse=True)
def wait_synced() -> Iterator[Callable[[], None]]:
    """Waits until every file that was written is on the disk; called after each test."""

    def wait() -> None:
        for thread in threading.enumerate():
            if thread.name == "packed-sync":
                thread.join()

    yield wait
    wait()
