"""Merging generations: order, errors, time limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from coordinator.api.answer.arrivals import Arrivals, WriteTurns, one_by_one
from coordinator.generation import GenerationRequest
from pdserve.protocol import FinishReason, Prompt, SamplingParams
from pdserve.shared.clock import Clock, ManualClock
from pdserve.shared.errors import NodeLost
from tests.fakes.generator import FakeGeneration, Pause, Step, Tokens


def generation(*steps: Step) -> FakeGeneration:
    request = GenerationRequest(
        request_id="r", prompt=Prompt([1]), sampling=SamplingParams(max_tokens=99)
    )
    return FakeGeneration(request, list(steps))


def merged(*generations: FakeGeneration, clock: Clock | None = None) -> Arrivals:
    clock = clock or ManualClock()
    return Arrivals(generations, clock, WriteTurns(clock))


async def test_everything_that_is_there_comes_in_one_go() -> None:
    clock = ManualClock(5.0)
    arrivals = merged(generation(Tokens([1]), Tokens([2])), generation(Tokens([3])), clock=clock)
    taken = await arrivals.take()
    assert sorted((a.index, a.event.token_ids) for a in taken) == [(0, [1]), (0, [2]), (1, [3])]
    assert {a.at_s for a in taken} == {5.0}
    arrivals.close()


async def test_one_by_one_each_token_is_still_a_guess_or_none() -> None:
    arrivals = merged(generation(Tokens([1, 2, 3, 4], accepted=2, refused=5)))
    (arrived,) = await arrivals.take()
    events = [single.event for single in one_by_one(arrived)]
    assert [event.accepted for event in events] == [0, 0, 1, 1]
    assert [event.refused for event in events] == [5, 0, 0, 0]
    arrivals.close()


async def test_an_error_comes_after_what_came_before_it() -> None:
    arrivals = merged(generation(Tokens([1]), NodeLost("gone")))
    assert len(await arrivals.take()) == 1
    for _ in range(2):
        with pytest.raises(NodeLost):
            await arrivals.take()
    arrivals.close()


async def test_a_timeout_of_a_generation_is_not_the_readers() -> None:
    arrivals = merged(generation(TimeoutError("theirs")))
    with pytest.raises(TimeoutError, match="theirs"):
        await arrivals.take(10.0)
    arrivals.close()


async def test_waiting_ends_empty_at_its_time_limit() -> None:
    gate = asyncio.Event()
    arrivals = merged(generation(Tokens([1]), Pause(until=gate), Tokens([2])))
    assert len(await arrivals.take(0.01)) == 1
    for _ in range(2):
        assert await arrivals.take(0.01) == []
    gate.set()
    assert len(await arrivals.take(10.0)) == 1
    arrivals.close()


async def test_a_stopped_generation_may_end_as_it_likes() -> None:
    gate = asyncio.Event()
    stubborn = generation(NodeLost("while stopping"), Tokens([1]))
    arrivals = merged(stubborn, generation(Pause(until=gate), Tokens([7])))
    arrivals.stop(0)
    gate.set()
    assert [a.event.token_ids for a in await arrivals.take()] == [[7]]
    arrivals.close()


class HeldTurns(WriteTurns):
    """A turn comes when the test says so."""

    def wake(self, reader: Callable[[], None]) -> None:
        self.reader = reader


async def test_after_the_first_event_all_until_the_readers_turn_come_together() -> None:
    clock, turns, gate = ManualClock(), HeldTurns(ManualClock()), asyncio.Event()
    script = generation(Tokens([1]), Pause(until=gate), Tokens([2]), Pause(), Tokens([3]))
    arrivals = Arrivals([script], clock, turns)
    assert [a.event.token_ids for a in await arrivals.take()] == [[1]]
    reading = asyncio.create_task(arrivals.take())
    await asyncio.sleep(0)
    gate.set()
    for _ in range(9):
        await asyncio.sleep(0)
    assert not reading.done()
    turns.reader()
    assert [a.event.token_ids for a in await reading] == [[2], [3]]
    arrivals.close()


async def test_the_last_event_does_not_wait_for_a_turn() -> None:
    gate = asyncio.Event()
    last = Tokens([2], FinishReason.STOP)
    script = generation(Tokens([1]), Pause(until=gate), last)
    arrivals = Arrivals([script], ManualClock(), HeldTurns(ManualClock()))
    assert len(await arrivals.take()) == 1
    gate.set()
    async with asyncio.timeout(30):
        assert [a.event.token_ids for a in await arrivals.take()] == [[2]]
    arrivals.close()
