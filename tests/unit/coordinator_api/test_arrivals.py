"""Merging generations: order, errors, time limits."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.api.arrivals import Arrivals
from coordinator.generation import GenerationRequest
from pdserve.clock import ManualClock
from pdserve.errors import NodeLost
from pdserve.protocol import SamplingParams
from tests.unit.coordinator_api.fakes import FakeGeneration, Pause, Step, Tokens


def generation(*steps: Step) -> FakeGeneration:
    request = GenerationRequest(
        request_id="r", token_ids=[1], sampling=SamplingParams(max_tokens=99)
    )
    return FakeGeneration(request, list(steps))


async def test_everything_that_is_there_comes_in_one_go() -> None:
    clock = ManualClock(5.0)
    arrivals = Arrivals([generation(Tokens([1]), Tokens([2])), generation(Tokens([3]))], clock)
    taken = await arrivals.take()
    assert sorted((a.index, a.event.token_ids) for a in taken) == [(0, [1]), (0, [2]), (1, [3])]
    assert {a.at_s for a in taken} == {5.0}
    arrivals.close()


async def test_an_error_comes_after_what_came_before_it() -> None:
    arrivals = Arrivals([generation(Tokens([1]), NodeLost("gone"))], ManualClock())
    assert len(await arrivals.take()) == 1
    for _ in range(2):
        with pytest.raises(NodeLost):
            await arrivals.take()
    arrivals.close()


async def test_a_timeout_of_a_generation_is_not_the_readers() -> None:
    arrivals = Arrivals([generation(TimeoutError("theirs"))], ManualClock())
    with pytest.raises(TimeoutError, match="theirs"):
        await arrivals.take(10.0)
    arrivals.close()


async def test_nothing_in_time() -> None:
    gate = asyncio.Event()
    arrivals = Arrivals([generation(Tokens([1]), Pause(until=gate), Tokens([2]))], ManualClock())
    assert len(await arrivals.take(0.01)) == 1
    for _ in range(2):
        assert await arrivals.take(0.01) == []
    gate.set()
    assert len(await arrivals.take(10.0)) == 1
    arrivals.close()


async def test_a_stopped_generation_may_end_as_it_likes() -> None:
    gate = asyncio.Event()
    stubborn = generation(NodeLost("while stopping"), Tokens([1]))
    arrivals = Arrivals([stubborn, generation(Pause(until=gate), Tokens([7]))], ManualClock())
    arrivals.stop(0)
    gate.set()
    assert [a.event.token_ids for a in await arrivals.take()] == [[7]]
    arrivals.close()
