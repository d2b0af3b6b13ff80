"""Bodies share a bounded memory: none takes it all, slow senders go first, others wait."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.api.read import body_budget
from coordinator.api.read.body_budget import Body, BodyBudget
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import BuffersFull


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def budget(clock: ManualClock) -> BodyBudget:
    return BodyBudget(1000, clock)


def arriving(budget: BodyBudget, payer: str, num_bytes: int, ended: list[str]) -> Body:
    body = budget.body(payer)
    body.may_end(lambda: ended.append(f"{payer}{num_bytes}"))
    assert body.try_take(num_bytes)
    return body


def test_a_payer_holds_at_most_half(budget: BodyBudget) -> None:
    first, second = budget.body("a"), budget.body("a")
    assert first.try_take(400)
    assert not second.try_take(101)
    assert second.try_take(100)
    assert budget.body("b").try_take(500), "half is left for others"
    first.release()
    first.release()
    assert budget.num_bytes == 600


def test_a_slow_sender_of_the_same_payer_is_ended(budget: BodyBudget, clock: ManualClock) -> None:
    ended: list[str] = []
    small, large = arriving(budget, "a", 100, ended), arriving(budget, "a", 400, ended)
    assert not budget.body("a").try_take(50), "they may just be on their way"
    clock.advance(body_budget.SLOW_S)
    assert budget.body("a").try_take(50)
    assert ended == ["a400"], "the one that costs most is enough"
    assert large.was_ended
    assert not large.try_take(1)
    assert not small.was_ended


def test_who_holds_most_makes_room_for_others(budget: BodyBudget) -> None:
    ended: list[str] = []
    arriving(budget, "a", 500, ended)
    arriving(budget, "b", 300, ended)
    arriving(budget, "b", 150, ended)
    assert arriving(budget, "c", 80, ended).num_bytes == 80
    assert ended == ["a500"]


def test_what_has_arrived_is_not_ended(budget: BodyBudget, clock: ManualClock) -> None:
    ended: list[str] = []
    arriving(budget, "a", 500, ended).arrived()
    clock.advance(60)
    assert not budget.body("a").try_take(1)
    assert ended == []


async def test_room_that_becomes_free_goes_to_those_who_wait(budget: BodyBudget) -> None:
    first, others = budget.body("a"), [budget.body("a") for _ in range(3)]
    await first.take(500)
    waiting = [asyncio.create_task(other.take(200)) for other in others]
    await asyncio.sleep(0)
    assert budget.num_bytes == 500
    first.release()
    await asyncio.wait(waiting[:2])
    assert [task.done() for task in waiting] == [True, True, False]
    others[0].release()
    await waiting[2]
    assert budget.num_bytes == 400


async def test_waiting_for_room_is_bounded(clock: ManualClock) -> None:
    budget = BodyBudget(1000, clock, wait_s=0.01)
    await budget.body("a").take(500)
    late = budget.body("a")
    with pytest.raises(BuffersFull, match="try again later"):
        await late.take(1)
    assert (budget.num_bytes, late.num_bytes) == (500, 0)


async def test_a_wait_that_is_given_up_takes_nothing(budget: BodyBudget) -> None:
    first, second = budget.body("a"), budget.body("a")
    await first.take(500)
    waiting = asyncio.create_task(second.take(10))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    first.release()
    assert budget.num_bytes == 0
