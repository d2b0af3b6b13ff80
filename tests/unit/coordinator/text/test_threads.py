"""Long texts are tokenised in turns, within their deadlines, by threads that nobody can hoard."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from coordinator.text.threads import NUM_THREADS, Asker, TextThreads
from pdserve.shared.errors import DeadlineExceeded, Overloaded
from tests.waits import WITHIN_S, leap


class Work:
    """Work that is held up until `may_end`."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.may_end = threading.Event()
        self.has_begun = threading.Semaphore(0)
        self.has_ended = threading.Semaphore(0)

    def of(self, name: str) -> Callable[[], None]:
        def work() -> None:
            self.has_begun.release()
            assert self.may_end.wait(WITHIN_S)
            self.done.append(name)
            self.has_ended.release()

        return work

    async def began(self, num: int) -> None:
        for _ in range(num):
            assert await asyncio.to_thread(self.has_begun.acquire, timeout=WITHIN_S)

    async def ended(self, num: int) -> None:
        for _ in range(num):
            assert await asyncio.to_thread(self.has_ended.acquire, timeout=WITHIN_S)


async def test_a_neighbour_does_not_wait_for_all_of_a_flood() -> None:
    pool, work = TextThreads(), Work()
    flood = [asyncio.create_task(pool.run(work.of("a"), Asker("a"))) for _ in range(50)]
    await work.began(NUM_THREADS)
    neighbour = asyncio.create_task(pool.run(work.of("b"), Asker("b")))
    await asyncio.sleep(0)
    work.may_end.set()
    await asyncio.gather(*flood, neighbour)
    assert work.done.index("b") <= 2 * NUM_THREADS


async def test_who_leaves_keeps_the_turn_until_its_work_is_done() -> None:
    pool, work = TextThreads(), Work()
    leaving = [asyncio.create_task(pool.run(work.of("a"), Asker("a"))) for _ in range(20)]
    await work.began(NUM_THREADS)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    other = asyncio.create_task(pool.run(work.of("b"), Asker("b")))
    work.may_end.set()
    await other
    await work.ended(NUM_THREADS + 1)
    assert sorted(work.done) == ["a"] * NUM_THREADS + ["b"], "what had not begun never does"


async def test_the_deadline_counts_while_a_text_waits_and_while_it_is_tokenised() -> None:
    pool, work = TextThreads(), Work()
    soon = Asker("a", time.monotonic() + WITHIN_S)
    running = [asyncio.create_task(pool.run(work.of("a"), soon)) for _ in range(NUM_THREADS)]
    await work.began(NUM_THREADS)
    leap(WITHIN_S)
    for late in [*running, pool.run(work.of("b"), Asker("b", time.monotonic() + 0.01))]:
        with pytest.raises(DeadlineExceeded, match="before its text was tokenised"):
            await late
    with pytest.raises(DeadlineExceeded):
        await pool.run(work.of("c"), Asker("c", 0.0))
    work.may_end.set()
    await pool.run(work.of("d"), Asker("d"))
    assert {"b", "c"}.isdisjoint(work.done)


async def test_waiting_for_a_turn_is_bounded() -> None:
    pool, work = TextThreads(wait_s=0.01), Work()
    running = [asyncio.create_task(pool.run(work.of("a"), Asker("a"))) for _ in range(NUM_THREADS)]
    await work.began(NUM_THREADS)
    with pytest.raises(Overloaded, match="try again later"):
        await pool.run(work.of("b"), Asker("b"))
    work.may_end.set()
    await asyncio.gather(*running)
