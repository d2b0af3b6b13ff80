"""Steps of two places in turn, by when they are due."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest

from pdserve._native import Ledger
from pdserve.engine.engine import Engine
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.node.places.turns import LATE_S, PATIENCE_S, LoadingTurns, PlaceTurns
from pdserve.shared.clock import ManualClock, SystemClock
from pdserve.shared.errors import RequestCancelled
from tests.fakes.runner import FakeRunner, Observer, decode_policy, expected_output
from tests.requests import make_request

BLOCK = 4


@pytest.fixture
def path() -> Iterator[str]:
    fd = os.memfd_create("ledger", os.MFD_CLOEXEC)
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


class SlowRunner(FakeRunner):
    """Notes when it computes."""

    def __init__(self, name: str, seen: list[tuple[float, float, str]]) -> None:
        super().__init__(BLOCK)
        self.name, self.seen = name, seen

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        began_s = time.monotonic()
        sampled = super().execute(rows, progress)
        time.sleep(0.001)
        self.seen.append((began_s, time.monotonic(), self.name))
        return sampled


def all_done(observer: Observer) -> bool:
    return len(observer.done) == 2


async def test_engines_of_two_places_compute_in_turn(path: str) -> None:
    seen: list[tuple[float, float, str]] = []
    running, observers = [], []
    for number, name in enumerate("ab"):
        engine = Engine(
            Queues(BlockPool(64, BLOCK), SystemClock()), decode_policy(16, 8), frozenset()
        )
        ledger = Ledger(path, number, 1000)
        engine.turns = PlaceTurns(ledger, engine, SystemClock(), 0.25)
        observers.append(observer := Observer())
        running.append(asyncio.create_task(engine.run(SlowRunner(name, seen), observer)))
        for index in range(2):
            engine.submit(make_request([1, 2, 3 + index], max_tokens=20))
    for observer in observers:
        await observer.until(partial(all_done, observer))
        for request in observer.done.values():
            assert request.output_token_ids == expected_output(request)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    seen.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(seen)), "both at a time"
    names = "".join(name for *_, name in seen)
    assert set(names[: len(names) // 2]) == {"a", "b"}, "one of them waits for the other's end"
    assert Ledger(path, 2, 1000).try_turn(1.0), "a turn outlives its engine"


async def test_an_engine_that_ends_does_not_wait_for_its_turn(path: str) -> None:
    other = Ledger(path, 1, 1000)
    assert other.try_turn(3600.0)
    engine = Engine(Queues(BlockPool(64, BLOCK), SystemClock()), decode_policy(16, 8), frozenset())
    engine.turns = PlaceTurns(Ledger(path, 0, 1000), engine, SystemClock(), 0.25)
    engine.submit(make_request([1, 2], max_tokens=2))
    running = asyncio.create_task(engine.run(FakeRunner(BLOCK), Observer()))
    async with asyncio.timeout(30):
        while not other.num_waiting:
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert other.num_waiting == 0


@dataclass
class Asked:
    """A ledger that notes what is said of turns."""

    num_waiting: int = 0
    is_free: bool = True
    due_s: list[float] = field(default_factory=list)
    passed: list[bool] = field(default_factory=list)

    def await_turn(self, due_s: float, lease_s: float, within_s: float) -> bool:
        self.due_s.append(due_s)
        return self.is_free

    def try_turn(self, lease_s: float) -> bool:
        return self.is_free

    def pass_turn(self, has_more: bool, due_s: float = 0.0, lease_s: float = 0.0) -> bool:
        self.passed.append(has_more)
        self.due_s.append(due_s)
        return has_more


def test_the_most_urgent_token_says_when_a_step_is_due() -> None:
    clock, ledger = ManualClock(100.0), Asked()
    engine = Engine(Queues(BlockPool(64, BLOCK), clock), decode_policy(16, 8), frozenset())
    engine.step_time_s = 0.01
    turns = PlaceTurns(cast(Any, ledger), engine, clock, 0.25)

    def due_s() -> float:
        assert turns.wait()()
        return ledger.due_s[-1]

    assert due_s() == 100 + PATIENCE_S, "nothing is promised"
    prompt = make_request([1, 2])
    prompt.targets = Targets(first_token_s=100.1)
    engine.queues.submit(prompt)
    assert due_s() == pytest.approx(100.1 - 0.01)
    late = make_request([1, 2])
    late.targets = Targets(first_token_s=90.0)
    engine.queues.submit(late)
    assert due_s() == 100 - LATE_S, "others are not kept out for ever by who is late"


def test_who_waits_again_is_due_by_when_it_began_to_wait() -> None:
    clock, ledger = ManualClock(100.0), Asked(is_free=False)
    engine = Engine(Queues(BlockPool(64, BLOCK), clock), decode_policy(16, 8), frozenset())
    turns = PlaceTurns(cast(Any, ledger), engine, clock, 0.25)
    for _ in range(5):
        assert not turns.wait()()
        clock.advance(1.0)
    assert ledger.due_s == [100 + PATIENCE_S] * 5, "others that are late keep it out for ever"
    ledger.is_free = True
    assert turns.wait()()
    assert turns.wait()()
    assert ledger.due_s[-2:] == [100 + PATIENCE_S, 105 + PATIENCE_S]
    ledger.is_free = False
    assert not turns.wait()()
    turns.over(has_more=False)  # it was cancelled, and waits for nothing
    clock.advance(1.0)
    assert not turns.wait()()
    assert ledger.due_s[-1] == 106 + PATIENCE_S


def test_a_turn_that_nobody_waits_for_is_kept_without_a_word() -> None:
    ledger = Asked()
    engine = Engine(Queues(BlockPool(64, BLOCK), ManualClock()), decode_policy(16, 8), frozenset())
    turns = PlaceTurns(cast(Any, ledger), engine, ManualClock(), 0.25)
    turns.over(has_more=True)
    assert ledger.passed == []
    ledger.num_waiting = 1
    turns.over(has_more=True)
    turns.over(has_more=False)
    assert ledger.passed == [True, False]


def test_steps_are_measured_in_turn_too(path: str) -> None:
    def unwanted() -> None:
        raise RequestCancelled("the node was stopped")

    loading, other = LoadingTurns(Ledger(path, 0, 1000), SystemClock()), Ledger(path, 1, 1000)
    loading.next(unwanted)
    loading.next(unwanted)
    assert not other.try_turn(1.0)
    loading.over()
    assert other.try_turn(3600.0)
    with pytest.raises(RequestCancelled):
        loading.next(unwanted)
