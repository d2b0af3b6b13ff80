"""Streams are written in turns of a few, with rests as long as the turns."""

from __future__ import annotations

import asyncio
from functools import partial

from coordinator.api.answer.arrivals import WriteTurns
from pdserve.shared.clock import ManualClock

A_FEW = 8


class Readers:
    """Readers that note their turn; each then works for `work_s`."""

    def __init__(self, work_s: float) -> None:
        self.clock = ManualClock()
        self.turns = WriteTurns(self.clock)
        self.woken: list[int] = []
        self._work_s = work_s

    def ask(self, *readers: int) -> None:
        for reader in readers:
            self.turns.wake(partial(self._wake, reader))

    def _wake(self, reader: int) -> None:
        self.woken.append(reader)
        asyncio.get_running_loop().call_soon(self.clock.advance, self._work_s)


async def turns_of_the_loop(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_readers_that_take_no_time_are_woken_in_order_without_a_rest() -> None:
    readers = Readers(work_s=0.0)
    readers.ask(*range(3 * A_FEW))
    await turns_of_the_loop(20)
    assert readers.woken == list(range(3 * A_FEW))
    readers.ask(99)
    await turns_of_the_loop(2)
    assert readers.woken[-1] == 99


async def test_other_work_is_done_between_turns() -> None:
    readers = Readers(work_s=0.0)
    readers.ask(*range(3 * A_FEW))
    seen: list[int] = []
    while len(readers.woken) < 3 * A_FEW:
        await asyncio.sleep(0)
        seen.append(len(readers.woken))
    assert {A_FEW, 2 * A_FEW} <= set(seen)


async def test_a_rest_lasts_as_long_as_the_turn_took() -> None:
    readers = Readers(work_s=0.005)
    asyncio.get_running_loop().time = readers.clock.now  # type: ignore[method-assign]
    readers.ask(*range(A_FEW))
    await turns_of_the_loop(5)
    readers.ask(99)  # its turn is 8 x 5 ms later
    await turns_of_the_loop(50)
    assert 99 not in readers.woken
    readers.clock.advance(0.039)
    await turns_of_the_loop(50)
    assert 99 not in readers.woken
    readers.clock.advance(0.001)
    await turns_of_the_loop(50)
    assert 99 in readers.woken


async def test_a_turn_that_stalled_delays_the_next_one_by_little() -> None:
    readers = Readers(work_s=1.0)
    readers.ask(*range(A_FEW))
    await turns_of_the_loop(5)
    readers.clock.advance(0.05)
    readers.ask(99)
    await turns_of_the_loop(2)
    assert readers.woken[-1] == 99


async def test_a_rest_that_nobody_needed_is_forgotten() -> None:
    readers = Readers(work_s=0.01)
    readers.ask(*range(A_FEW))
    await turns_of_the_loop(5)
    readers.clock.advance(A_FEW * 0.01)
    readers.ask(99)
    await turns_of_the_loop(2)
    assert readers.woken[-1] == 99
