"""Jobs in threads: results, errors, and never leaving one behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from kv_transfer.threads import INLINE_BYTES, CancelFlag, CopyThreads, together
from pdserve.shared.errors import PeerLost
from tests.waits import until


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
    cancel = CancelFlag()
    has_begun, may_end, has_ended = [threading.Event() for _ in range(3)]

    def job() -> None:
        has_begun.set()
        may_end.wait(30)
        has_ended.set()

    task = asyncio.create_task(threads.run(job, cancel))
    await until(has_begun.is_set)
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
    has_begun, may_end = threading.Event(), threading.Event()

    def job() -> None:
        has_begun.set()
        may_end.wait(30)
        raise OSError("the socket was shut down")

    task = asyncio.create_task(threads.run(job, CancelFlag()))
    await until(has_begun.is_set)
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
    first = asyncio.create_task(threads.run(lambda: may_end.wait(30), CancelFlag()))
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


# ---- jobs at the same time ---------------------------------------------------------------------


class Parts:
    """Two jobs: one fails at once, and the other one takes a while to end."""

    def __init__(self) -> None:
        self.is_ending, self.may_end = asyncio.Event(), asyncio.Event()

    async def breaks(self) -> None:
        raise PeerLost("the connection broke")

    async def ends_late(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_ending.set()
            await self.may_end.wait()

    async def both(self) -> None:
        await together([self.ends_late(), self.breaks()])


async def test_results_come_in_the_order_of_the_jobs() -> None:
    assert await together([]) == []
    assert await together([asyncio.sleep(0, 7)]) == [7]
    assert await together([asyncio.sleep(0.001, 7), asyncio.sleep(0, 8)]) == [7, 8]


async def test_the_first_error_is_raised_when_all_have_ended() -> None:
    parts = Parts()
    task = asyncio.create_task(parts.both())
    await parts.is_ending.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    parts.may_end.set()
    with pytest.raises(PeerLost):
        await task


async def test_a_cancellation_after_an_error_stays_one() -> None:
    """The error used to be raised instead, and a request went on that had been given up."""
    parts = Parts()
    task = asyncio.create_task(parts.both())
    await parts.is_ending.wait()
    task.cancel()
    parts.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline_after_an_error_is_still_known_as_one() -> None:
    """What was left of the error made a timeout look like a cancellation by somebody else."""
    parts = Parts()
    parts.may_end.set()

    async def try_twice() -> None:
        async with asyncio.timeout(0.01):
            with suppress(PeerLost):
                await parts.both()
            await asyncio.Event().wait()  # the second time in vain

    with pytest.raises(TimeoutError):
        await try_twice()


# ---- copies ------------------------------------------------------------------------------------

LOOP = "on the event loop"


class Recorded:
    """A copy that says where each of its pieces is done, and copies nothing."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.pieces: list[tuple[str, int]] = []

    def __call__(self, cancel: np.ndarray, start: int, max_bytes: int) -> int:
        is_loop = threading.current_thread() is threading.main_thread()
        position = start if cancel[0] else min(start + max_bytes, self.num_bytes)
        self.pieces.append((LOOP if is_loop else "in a thread", position - start))
        return position


@pytest.mark.parametrize(
    ("num_bytes", "pieces"),
    [
        (1, [(LOOP, 1)]),
        (INLINE_BYTES, [(LOOP, INLINE_BYTES)]),
        (INLINE_BYTES + 1, [(LOOP, INLINE_BYTES), (LOOP, 1)]),
        (4 * INLINE_BYTES, [(LOOP, INLINE_BYTES)] * 4),
        (4 * INLINE_BYTES + 1, [("in a thread", 4 * INLINE_BYTES + 1)]),
    ],
)
async def test_the_event_loop_copies_little_at_a_time(
    threads: CopyThreads, num_bytes: int, pieces: list[tuple[str, int]]
) -> None:
    copy = Recorded(num_bytes)
    await threads.copy(copy, num_bytes)
    assert copy.pieces == pieces


async def test_others_run_between_the_turns_of_a_copy(threads: CopyThreads) -> None:
    copy, seen = Recorded(3 * INLINE_BYTES), []

    async def watch() -> None:
        while len(copy.pieces) < 3:
            seen.append(len(copy.pieces))
            await asyncio.sleep(0)

    await asyncio.gather(threads.copy(copy, copy.num_bytes), watch())
    assert seen == [1, 2]


async def test_only_one_copy_takes_turns_at_a_time(threads: CopyThreads) -> None:
    first, second, third = (Recorded(2 * INLINE_BYTES) for _ in range(3))
    await asyncio.gather(*(threads.copy(c, c.num_bytes) for c in (first, second)))
    await threads.copy(third, third.num_bytes)
    assert [piece[0] for piece in first.pieces] == [LOOP, LOOP]
    assert second.pieces == [("in a thread", 2 * INLINE_BYTES)]
    assert third.pieces == first.pieces


async def test_a_cancelled_copy_takes_no_further_turn(threads: CopyThreads) -> None:
    copy = Recorded(4 * INLINE_BYTES)
    task = asyncio.create_task(threads.copy(copy, copy.num_bytes))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(copy.pieces) == 2
    await threads.copy(copy, copy.num_bytes)  # the next one may take turns again
    assert len(copy.pieces) == 6
