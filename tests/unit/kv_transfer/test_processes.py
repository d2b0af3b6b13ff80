"""Exporters in real processes, which are killed and stopped in the middle of transfers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from kv_transfer.links.link import Link
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from pdserve.shared.errors import PeerLost, TransferTimeout
from tests.unit.kv_transfer.exporter_process import Started
from tests.unit.kv_transfer.pairs import (
    ENDLESS_BLOCKS,
    LARGE,
    REAL_BY_DEFAULT,
    assert_still,
    first_bytes,
    make_pool,
    make_puller,
)
from tests.waits import leap

ROOT = Path(__file__).parents[3]
TABLE = [2] * ENDLESS_BLOCKS
ENDLESS_S = 60.0  # the deadline of a pull
SOON_S = 20.0  # what is found out before it, however busy the machine is


@dataclass
class Peer:
    process: subprocess.Popen[bytes]
    started: Started
    puller: Puller
    link: Link
    pool: ExportedPool

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    async def start_endless(self) -> asyncio.Task[object]:
        """A pull in the middle of its transfer."""
        pulling = self.puller.pull(self.link, self.started.endless, TABLE, 0, ENDLESS_S)
        task = asyncio.create_task(pulling)
        await first_bytes(self.pool, 2)
        assert not task.done()
        return task

    async def pull_short(self, timeout_s: float = ENDLESS_S) -> None:
        await self.puller.pull(self.link, self.started.short, [0], 0, timeout_s)


@contextmanager
def exporter_process(kind: str) -> Iterator[tuple[subprocess.Popen[bytes], Started]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.kv_transfer.exporter_process", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        assert process.stdout is not None
        try:
            yield process, msgspec.json.decode(process.stdout.readline(), type=Started)
        finally:
            process.kill()


@asynccontextmanager
async def linked(process: subprocess.Popen[bytes], started: Started) -> AsyncIterator[Peer]:
    pool = make_pool(LARGE, 4)
    puller = make_puller(pool, LARGE)
    link = await puller.connect(started.welcome, timeout_s=SOON_S)
    assert [link.transport] == [offer.name for offer in started.welcome.offers]
    yield Peer(process, started, puller, link, pool)
    await link.close()
    await puller.close()
    pool.close()


@pytest.fixture(scope="module", params=REAL_BY_DEFAULT)
def lasting_process(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[subprocess.Popen[bytes], Started]]:
    with exporter_process(request.param) as process_and_started:
        yield process_and_started


@pytest.fixture
async def peer(
    lasting_process: tuple[subprocess.Popen[bytes], Started],
) -> AsyncIterator[Peer]:
    async with linked(*lasting_process) as made:
        yield made


@pytest.fixture(params=REAL_BY_DEFAULT)
async def doomed(request: pytest.FixtureRequest) -> AsyncIterator[Peer]:
    """A peer for tests that kill it."""
    with exporter_process(request.param) as process_and_started:
        async with linked(*process_and_started) as made:
            yield made


async def test_pull_from_another_process(peer: Peer) -> None:
    await peer.pull_short()
    expected = make_pool(LARGE, 4, seed=1)
    assert (peer.pool.data[0] == expected.data[3]).all()
    expected.close()


async def test_kill_in_the_middle(doomed: Peer) -> None:
    task = await doomed.start_endless()
    doomed.signal(signal.SIGKILL)
    if doomed.link.transport == "shm":
        # Its memory is still here and still what it was: the pull goes on, so end it.
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])
    else:
        started_s = time.monotonic()
        with pytest.raises(PeerLost, match=r"broke|did not answer"):
            await task
        assert time.monotonic() - started_s < SOON_S
    await assert_still(doomed.pool)


async def test_pull_after_a_kill(doomed: Peer) -> None:
    doomed.signal(signal.SIGKILL)
    if doomed.link.transport == "shm":
        await doomed.pull_short()
        expected = make_pool(LARGE, 4, seed=1)
        assert (doomed.pool.data[0] == expected.data[3]).all()
        expected.close()
    else:
        started_s = time.monotonic()
        with pytest.raises(PeerLost, match=r"cannot connect|has hung up"):
            await doomed.pull_short()
        assert time.monotonic() - started_s < SOON_S
    with pytest.raises(PeerLost):
        await doomed.puller.connect(doomed.started.welcome, timeout_s=SOON_S)


async def test_stop_in_the_middle(peer: Peer) -> None:
    task = await peer.start_endless()
    peer.signal(signal.SIGSTOP)
    leap(ENDLESS_S)
    with pytest.raises(TransferTimeout):
        await task
    peer.signal(signal.SIGCONT)
    await assert_still(peer.pool)
    await peer.pull_short()


async def test_pull_while_stopped(peer: Peer) -> None:
    peer.signal(signal.SIGSTOP)
    if peer.link.transport in ("shm", "ucx"):
        await peer.pull_short()  # needs none of the exporter's time
    else:
        with pytest.raises(TransferTimeout):
            await peer.pull_short(timeout_s=0.3)
    peer.signal(signal.SIGCONT)
    await peer.pull_short()


async def test_cancel_while_stopped(peer: Peer) -> None:
    task = await peer.start_endless()
    peer.signal(signal.SIGSTOP)
    await asyncio.sleep(0.05)
    started_s = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started_s < SOON_S
    peer.signal(signal.SIGCONT)
    await assert_still(peer.pool)
