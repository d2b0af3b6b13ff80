"""Jobs in threads: results, errors, and never leaving one behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from kv_transfer.threads import CancelFlag, CopyThreads


@pytest.fixture
def threads() -> Iterator[CopyThreads]:
    made = CopyThreads(1, "test")
    yield made
    made.close()


async def test_result_and_error(threads: CopyThreads) -> None:
    assert await threads.run(lambda: 7, CancelFlag()) == 7
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, CancelFlag())


async def test_cancelling_sets_the_flag_and_waits_for_the_end(threads: CopyThreads) -> None:
    cancel, may_end, has_ended = CancelFlag(), threading.Event(), threading.Event()

    def job() -> None:
        may_end.wait(10)
        has_ended.set()

    task = asyncio.create_task(threads.run(job, cancel))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    assert cancel.byte[0] == 1
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert has_ended.is_set()


async def cancelled_while_it_fails(threads: CopyThreads) -> asyncio.Task[None]:
    """A job that is told to stop, and then raises."""
    may_end = threading.Event()

    def job() -> None:
        may_end.wait(10)
        raise OSError("the socket was shut down")

    task = asyncio.create_task(threads.run(job, CancelFlag()))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    return task


async def test_a_job_that_fails_while_cancelled_is_a_cancellation(threads: CopyThreads) -> None:
    task = await cancelled_while_it_fails(threads)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_job_cancelled_in_the_queue_never_runs(threads: CopyThreads) -> None:
    may_end, ran = threading.Event(), threading.Event()
    first = asyncio.create_task(threads.run(lambda: may_end.wait(10), CancelFlag()))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(threads.run(ran.set, CancelFlag()))
    await asyncio.sleep(0.01)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    may_end.set()
    await first
    await threads.run(lambda: None, CancelFlag())
    assert not ran.is_set()


async def test_an_error_after_a_cancellation_is_nobodys(threads: CopyThreads) -> None:
    """It is not reported as one that nobody has looked at."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    task = await cancelled_while_it_fails(threads)
    await asyncio.wait([task])
    del task
    gc.collect()
    assert reported == []
