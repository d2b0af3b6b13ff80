"""A thread that can be left behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kv_transfer.lone_thread import LoneThread
from tests.unit.kv_transfer.gpu_pairs import until


def is_alive(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


async def test_jobs_run_in_order_on_one_thread() -> None:
    thread = LoneThread("lone")
    seen: list[int] = []
    idents = await asyncio.gather(
        *[thread.start(lambda i=i: (seen.append(i), threading.get_ident())[1]) for i in range(9)]
    )
    assert seen == list(range(9))
    assert len(set(idents) | {threading.get_ident()}) == 2
    thread.close()
    await until(lambda: not is_alive("lone"))


async def test_an_error_is_the_waiting_sides() -> None:
    thread = LoneThread("lone")
    with pytest.raises(ZeroDivisionError):
        await thread.start(lambda: 1 / 0)
    assert await thread.start(lambda: 5) == 5
    thread.close()


async def test_whoever_waits_can_walk_away() -> None:
    """From a job that hangs, one that waits behind it, and one that will fail."""
    thread, gate, begun = LoneThread("lone"), threading.Event(), threading.Event()
    seen: list[str] = []

    def hang() -> None:
        begun.set()
        gate.wait(30)
        seen.append("hung")

    hanging, waiting = thread.start(hang), thread.start(lambda: seen.append("waited"))
    thread.start(lambda: 1 / 0)  # nobody ever looks at its error, which is no warning
    await until(begun.is_set)
    for call in (hanging, waiting):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await call
    gate.set()
    thread.close()
    await until(lambda: not is_alive("lone"))
    assert seen == ["hung"]  # what had not begun never did


def test_a_stuck_one_is_a_daemon() -> None:
    thread = LoneThread("stuck")
    gate = threading.Event()
    thread.submit(gate.wait)
    assert [t.daemon for t in threading.enumerate() if t.name == "stuck"] == [True]
    thread.close()
    gate.set()
