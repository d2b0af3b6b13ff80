"""The context of a pull: its deadline, the link's end, and cancellations that are none of them."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.links.in_flight import Pulling, PullsInFlight
from pdserve.shared.errors import TransferCancelled, TransferTimeout


@pytest.fixture
def pulls() -> PullsInFlight:
    return PullsInFlight("p0", lambda: "shm")


async def pull(pulls: PullsInFlight, timeout_s: float = 5) -> None:
    async with Pulling(pulls, timeout_s):
        await asyncio.Event().wait()


async def test_a_late_pull_is_a_timeout_and_its_task_goes_on(pulls: PullsInFlight) -> None:
    with pytest.raises(TransferTimeout, match=r"from 'p0' over shm took longer than 0.01 s"):
        await pull(pulls, 0.01)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await pulls.close()


async def test_closing_ends_pulls_and_refuses_further_ones(pulls: PullsInFlight) -> None:
    tasks = [asyncio.create_task(pull(pulls)) for _ in range(3)]
    await asyncio.sleep(0)
    await pulls.close()
    for task in tasks:
        with pytest.raises(TransferCancelled, match="to 'p0' was closed during the pull"):
            await task
    with pytest.raises(TransferCancelled, match="to 'p0' is closed"):
        await pull(pulls)


async def test_closing_waits_for_the_end_of_pulls(pulls: PullsInFlight) -> None:
    has_ended = asyncio.Event()

    async def stubborn() -> None:
        async with Pulling(pulls, 5):
            try:
                await asyncio.Event().wait()
            finally:
                await has_ended.wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    closing = asyncio.create_task(pulls.close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    has_ended.set()
    await closing
    with pytest.raises(TransferCancelled):
        await task


async def test_cancelling_the_task_is_no_timeout(pulls: PullsInFlight) -> None:
    task = asyncio.create_task(pull(pulls))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_at_the_moment_of_the_end_stays_one(pulls: PullsInFlight) -> None:
    task = asyncio.create_task(pull(pulls))
    await asyncio.sleep(0)
    task.cancel()
    await pulls.close()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_outer_deadline_is_the_callers(pulls: PullsInFlight) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await pull(pulls)


async def test_a_system_call_that_times_out_is_a_timeout_and_other_errors_pass(
    pulls: PullsInFlight,
) -> None:
    with pytest.raises(TransferTimeout):
        async with Pulling(pulls, 5):
            raise TimeoutError(110, "Connection timed out")
    with pytest.raises(ZeroDivisionError):
        async with Pulling(pulls, 5):
            raise ZeroDivisionError
