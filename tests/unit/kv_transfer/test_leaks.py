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


class Held:
    """What this process holds: open descriptors, threads. Those of other tests may end any time."""

    def __init__(self) -> None:
        gc.collect()
        self.fds, self.threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())

    async def assert_no_more(self) -> None:
        await asyncio.sleep(0)  # the loop itself holds the task whose end has woken us
        now = Held()
        assert (now.fds - self.fds, now.threads - self.threads) == (set(), set())


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
    before = Held()
    async with open_pair(kind, SMALL) as pair:
        await pull_in_every_way(pair, 100)
        during = Held()
        await pull_in_every_way(pair, 300)
        now = Held()
        assert len(now.fds - during.fds) <= 2  # connections that wait for the next pull
        assert len(now.threads - during.threads) <= 4
    del pair  # holds the pools' mappings
    await before.assert_no_more()


@pytest.mark.parametrize("kind", BY_DEFAULT)
async def test_closed_pairs_leave_no_descriptors_and_no_threads(kind: str) -> None:
    before = Held()
    for _ in range(6):
        async with open_pair(kind, SMALL) as pair:
            links = [await pair.puller.connect(pair.exporter.welcome(), 30) for _ in range(5)]
            await pair.pull(pair.exporter.issue("r", 0, 4, [1]), [2])
            for link in links:
                await link.close()
    del pair  # holds the pools' mappings
    await before.assert_no_more()
