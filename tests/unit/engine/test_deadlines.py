"""Requests whose answer nobody wants any more leave the engine before they waste a step."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.engine.core import EngineCore
from pdserve.engine.engine import Engine
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, SampledToken
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.shared.clock import ManualClock, SystemClock
from pdserve.shared.errors import DeadlineExceeded
from tests.fakes.runner import (
    FakeRunner,
    Observer,
    decode_policy,
    prefill_policy,
)
from tests.requests import make_request

BLOCK = 4


def due(deadline_s: float, num_tokens: int = 40) -> Request:
    return make_request(num_tokens, targets=Targets(deadline_s=deadline_s))


def step(core: EngineCore) -> list[Request]:
    """Who was in it."""
    rows = core.begin_step()
    sampled = [SampledToken(1) if row.samples else None for row in rows]
    for request in core.end_step(rows, sampled, 0.0):
        core.forget(request)
    return [row.request for row in rows]


@pytest.mark.parametrize("state", ["waiting", "half-prefilled", "decoding"])
def test_expired_in_any_state_it_is_gone_and_its_blocks_are_free(state: str) -> None:
    pool = BlockPool(11, BLOCK)
    policy = decode_policy(20, 8) if state == "decoding" else prefill_policy(20, 8)
    core = EngineCore(Queues(pool, ManualClock()), policy, frozenset())
    if state == "waiting":
        core.submit(due(9.0))
        assert step(core)
    request, other = due(5.0), due(7.0, num_tokens=4)
    core.submit(request)
    for _ in range({"waiting": 0, "half-prefilled": 1, "decoding": 3}[state]):
        assert step(core) == [request]
    core.submit(other)
    assert core.drop_expired(4.9) == []
    assert core.drop_expired(5.0) == [request]
    assert request not in step(core)
    assert core.next_deadline_s == 7.0
    assert core.drop_expired(20.0)
    assert core.next_deadline_s == float("inf")
    assert pool.num_free == 11
    assert core.num_requests == 0


async def test_the_observer_hears_of_it() -> None:
    pool, clock = BlockPool(20, BLOCK), ManualClock()
    engine = Engine(Queues(pool, clock), decode_policy(16, 8), frozenset())
    runner, observer = FakeRunner(BLOCK), Observer()
    in_time, too_late = due(10.0, 5), due(2.0, 6)
    clock.advance(3.0)
    engine.submit(in_time)
    engine.submit(too_late)
    task = asyncio.create_task(engine.run(runner, observer))
    await observer.until(lambda: observer.done)
    ((failed, error),) = observer.failed
    assert failed is too_late
    assert isinstance(error, DeadlineExceeded)
    assert all(request_id == in_time.request_id for step in runner.steps for request_id, _ in step)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_it_is_heard_of_while_nothing_runs() -> None:
    """There is no room, and nothing else that would wake the engine."""
    pool, clock = BlockPool(10, BLOCK), SystemClock()
    taken = pool.allocate(10)
    engine = Engine(Queues(pool, clock), prefill_policy(16, 8), frozenset())
    observer = Observer()
    task = asyncio.create_task(engine.run(FakeRunner(BLOCK), observer))
    engine.submit(due(clock.now() + 0.01))
    await observer.until(lambda: observer.failed)
    assert engine.num_requests == 0
    pool.release(taken)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
