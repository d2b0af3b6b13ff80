"""Hundreds of pulls, links and lives leave no descriptor and no thread behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from contextlib import suppress

import pytest

from kv_transfer import threads
from pdserve.shared.errors import StaleTicket, TransferTimeout
from tests.matrix import matrix
from tests.unit.kv_transfer.pairs import BY_DEFAULT, SMALL, Pair, open_pair


async def held() -> tuple[int, int]:
    """(open descriptors, threads)."""
    await asyncio.sleep(0)  # the loop itself holds the task whose end has woken us
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


async def pull_in_every_way(pair: Pair, rounds: int) -> None:
    """Complete, stale, timed out, and cancelled at some point."""
    for number in range(rounds):
        block = number % 16
        ticket = pair.exporter.issue("r", 0, 8, [block, block + 1])
        await pair.pull(ticket, [block, block + 1])
        if number % 10 == 0:
            with suppress(TransferTimeout):  # what needs no waiting is done by then
                await pair.pull(ticket, [block, block + 1], timeout_s=0)
            task = asyncio.create_task(pair.pull(ticket, [block, block + 1]))
            for _ in range(number // 10 % 12):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            pair.source.bump([block])
            with pytest.raises(StaleTicket):
                await pair.pull(ticket, [block, block + 1])


@pytest.mark.parametrize("in_threads", matrix([False, True], 1))
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_pulls_leave_no_descriptors_and_no_threads(
    kind: str, in_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_threads:
        monkeypatch.setattr(threads, "INLINE_BYTES", -1)
    before = await held()
    async with open_pair(kind, SMALL) as pair:
        await pull_in_every_way(pair, 100)
        during = await held()
        await pull_in_every_way(pair, 300)
        fds, num_threads = await held()
        assert fds <= during[0] + 2  # connections that wait for the next pull
        assert num_threads <= during[1] + 4
    del pair  # holds the pools' mappings
    assert await held() == before


@pytest.mark.parametrize("kind", BY_DEFAULT)
async def test_closed_pairs_leave_no_descriptors_and_no_threads(kind: str) -> None:
    before = await held()
    for _ in range(6):
        async with open_pair(kind, SMALL) as pair:
            links = [await pair.puller.connect(pair.exporter.welcome(), 30) for _ in range(5)]
            await pair.pull(pair.exporter.issue("r", 0, 4, [1]), [2])
            for link in links:
                await link.close()
    del pair  # holds the pools' mappings
    assert await held() == before
