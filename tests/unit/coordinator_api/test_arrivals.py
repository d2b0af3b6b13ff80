"""Merging generations: order, errors, time limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.api.arrivals import Arrivals
from coordinator.generation import GenerationRequest
from pdserve.clock import ManualClock
from pdserve.errors import NodeLost
from pdserve.protocol import FinishReason, SamplingParams, TokenEvent
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
    assert await arrivals.take() == []
    assert arrivals.is_exhausted
    await arrivals.close()


async def test_the_end_of_one_generation_does_not_wake_the_reader() -> None:
    gate = asyncio.Event()
    late = generation(Pause(until=gate), Tokens([2], FinishReason.STOP))
    arrivals = Arrivals([generation(Tokens([1], FinishReason.STOP)), late], ManualClock())
    assert len(await arrivals.take()) == 1
    taking = asyncio.create_task(arrivals.take())
    await asyncio.sleep(0.02)
    assert not taking.done()
    gate.set()
    assert [a.index for a in await taking] == [1]
    await arrivals.close()


async def test_an_error_comes_after_what_came_before_it() -> None:
    arrivals = Arrivals([generation(Tokens([1]), NodeLost("gone"))], ManualClock())
    assert len(await arrivals.take()) == 1
    for _ in range(2):
        with pytest.raises(NodeLost):
            await arrivals.take()
    await arrivals.close()


async def test_a_timeout_of_a_generation_is_not_the_readers() -> None:
    arrivals = Arrivals([generation(TimeoutError("theirs"))], ManualClock())
    with pytest.raises(TimeoutError, match="theirs"):
        await arrivals.take(10.0)
    await arrivals.close()


async def test_nothing_in_time() -> None:
    arrivals = Arrivals([generation(Pause(until=asyncio.Event()))], ManualClock())
    assert await arrivals.take(0.01) == []
    assert not arrivals.is_exhausted
    await arrivals.close()


async def test_a_stopped_generation_may_end_as_it_likes() -> None:
    class Stubborn(FakeGeneration):
        async def __aiter__(self) -> AsyncIterator[TokenEvent]:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise NodeLost("while stopping") from None
            yield TokenEvent(request_id="r", index=0, token_ids=[])

    stubborn = Stubborn(generation().request, [])
    gate = asyncio.Event()
    arrivals = Arrivals([stubborn, generation(Pause(until=gate), Tokens([7]))], ManualClock())
    await asyncio.sleep(0)
    await arrivals.stop(0)
    gate.set()
    assert [a.event.token_ids for a in await arrivals.take()] == [[7]]
    await arrivals.close()
