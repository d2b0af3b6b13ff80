"""The promise of `Puller.pull`: once it has ended, however, nothing writes to the destination."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import uvloop

from pdserve.shared.errors import PeerLost, StaleTicket, TransferCancelled, TransferTimeout
from tests.unit.kv_transfer.pairs import (
    BY_DEFAULT,
    LARGE,
    REAL_BY_DEFAULT,
    Pair,
    assert_still,
    endless_pull,
    first_bytes,
    open_pair,
)
from tests.waits import WITHIN_S, leap


@pytest.fixture(params=BY_DEFAULT)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with open_pair(request.param, LARGE, num_blocks=4) as opened:
        yield opened


async def cancel_and_wait(task: asyncio.Task[object]) -> float:
    """Seconds of processors that the cancellation took."""
    started_s = time.process_time()
    task.cancel()
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(asyncio.CancelledError):
            await task
    return time.process_time() - started_s


async def test_a_cancelled_pull_writes_nothing_more(pair: Pair) -> None:
    async with endless_pull(pair) as task:
        assert await cancel_and_wait(task) < 2
    await assert_still(pair.destination)
    assert pair.puller.statistics.cancelled == 1


async def test_a_cancelled_pull_does_not_spoil_the_next(pair: Pair) -> None:
    async with endless_pull(pair) as task:
        await cancel_and_wait(task)
    await pair.pull(pair.exporter.issue("r", 0, 128, [3, 0]), [0, 1])
    assert (pair.destination.data[[0, 1]] == pair.source.data[[3, 0]]).all()


async def test_a_pull_ends_at_its_deadline(pair: Pair) -> None:
    async with endless_pull(pair) as task:
        leap(WITHIN_S)
        with pytest.raises(TransferTimeout, match=r"'p0'.*longer than 60.0 s"):
            await task
    assert pair.puller.statistics.timeouts == 1


async def test_closing_the_link_cancels_its_pulls(pair: Pair) -> None:
    async with endless_pull(pair) as task:
        await pair.link.close()
        assert task.done()
        with pytest.raises(TransferCancelled, match="closed during the pull"):
            await task


async def test_a_second_cancellation_waits_as_well(pair: Pair) -> None:
    async with endless_pull(pair) as task:
        task.cancel()
        await asyncio.sleep(0)
        await cancel_and_wait(task)


async def test_pulls_that_wait_for_a_thread_can_be_cancelled(pair: Pair) -> None:
    async with endless_pull(pair):
        ticket, table = pair.issue_endless(), pair.endless_table
        waiting = [asyncio.create_task(pair.pull(ticket, table, 0, 60)) for _ in range(6)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=WITHIN_S)
        assert all(task.cancelled() for task in waiting)


@pytest.mark.parametrize("kind", ["tcp", "fake"])
async def test_an_exporter_that_closes_ends_the_pulls(kind: str) -> None:
    async with (
        open_pair(kind, LARGE, num_blocks=4) as pair,
        endless_pull(pair) as task,
    ):
        await pair.exporter.close()
        with pytest.raises(PeerLost):
            await task


@pytest.mark.parametrize("kind", BY_DEFAULT)
async def test_a_block_reused_while_it_is_read_never_validates(kind: str) -> None:
    # Of 1 MiB: a quarter of a second or more.
    num_blocks = {"shm": 4000, "coded": 250}.get(kind, 1000)
    async with open_pair(kind, LARGE, num_blocks=4) as pair:
        num_tokens = num_blocks * LARGE.block_size
        ticket = pair.exporter.issue("r", 0, num_tokens, [1] * num_blocks)
        task = asyncio.create_task(pair.pull(ticket, [2] * num_blocks))
        await first_bytes(pair.destination, 2)
        pair.source.bump([1])
        with pytest.raises(StaleTicket):
            await task
        assert pair.puller.statistics.stale == 1


@pytest.mark.parametrize("kind", REAL_BY_DEFAULT)
async def test_what_validates_is_never_torn(kind: str) -> None:
    """A block changes hands again and again under the pulls; each result is of one owner."""
    async with open_pair(kind, LARGE, num_blocks=4) as pair:
        valid = 0

        def hand_over(owner: int) -> bytes:
            pair.source.bump([1])
            pair.source.data[1] = owner
            return pair.exporter.issue("r", 0, LARGE.block_size, [1])

        async def pull(owner: int, ticket: bytes) -> None:
            nonlocal valid
            try:
                await pair.pull(ticket, [owner % 4])
            except StaleTicket:
                return
            assert (pair.destination.data[owner % 4] == owner).all()
            valid += 1

        for owner in range(1, 100):
            task = asyncio.create_task(pull(owner, hand_over(owner)))
            if owner % 3:
                await asyncio.sleep(0.0002 * (owner % 5))
            else:
                await task
            if not task.done():
                await asyncio.to_thread(hand_over, 255)
            await task
        assert valid >= 33
        assert valid + pair.puller.statistics.stale == 99


@pytest.mark.parametrize("kind", REAL_BY_DEFAULT)
def test_the_promise_holds_on_uvloop(kind: str) -> None:
    async def scenario() -> None:
        async with open_pair(kind, LARGE, num_blocks=4) as pair:
            async with endless_pull(pair) as task:
                await cancel_and_wait(task)
            async with endless_pull(pair, timeout_s=1) as task:
                with pytest.raises(TransferTimeout):
                    await task
            await pair.pull(pair.exporter.issue("r", 0, 128, [3, 0]), [0, 1])
            assert (pair.destination.data[[0, 1]] == pair.source.data[[3, 0]]).all()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
