"""What a step's report says about its shape: as it was planned, though its requests have moved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pdserve.engine.engine import Engine
from pdserve.engine.interface import StepReport
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.measured.perf_model import StepRow, StepShape
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import FakeRunner, QuietObserver, decode_policy, expected_output
from tests.requests import make_request


class Shapes(QuietObserver):
    """An observer that keeps them."""

    def __init__(self) -> None:
        self.seen: list[StepShape] = []
        self.is_over = asyncio.Event()

    def step_done(self, report: StepReport) -> None:
        self.seen.append(report.shape)
        assert report.period_s == report.model_s + report.overhead_s
        if any(row.request.is_done for row in report.rows):
            self.is_over.set()


async def test_chunks_then_decodes() -> None:
    engine = Engine(Queues(BlockPool(64, 4), ManualClock()), decode_policy(8, 4), frozenset())
    shapes = Shapes()
    task = asyncio.create_task(engine.run(FakeRunner(4), shapes))
    engine.submit(make_request(13, max_tokens=3))
    async with asyncio.timeout(30):
        await shapes.is_over.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert shapes.seen == [
        StepShape.of([StepRow(8, 0, is_sampled=False)]),
        StepShape.of([StepRow(5, 8)]),
        StepShape.of([StepRow(1, 13, is_decoding=True)]),
        StepShape.of([StepRow(1, 14, is_decoding=True)]),
    ]


async def test_who_is_held_sits_steps_out_and_says_the_same() -> None:
    """Alone, it is awaited; beside others, these go on meanwhile."""
    engine = Engine(Queues(BlockPool(64, 4), ManualClock()), decode_policy(8, 4), frozenset())
    shapes, slow = Shapes(), make_request(4, request_id="slow", max_tokens=3)
    quick = make_request(5, request_id="quick", max_tokens=6)
    others: list[int] = []

    def hold(rows: Sequence[Scheduled]) -> set[Request]:
        """Until the other one is done."""
        is_there = any(row.request is slow for row in rows)
        if is_there and slow.is_decoding and not quick.is_done:
            others.append(len(rows) - 1)
            return {slow}
        return set()

    engine.hold = hold
    task = asyncio.create_task(engine.run(FakeRunner(4), shapes))
    engine.submit(slow)
    async with asyncio.timeout(30):
        while not others:
            await asyncio.sleep(0)
        engine.submit(quick)
        while not slow.is_done:
            await asyncio.sleep(0)
            if quick.is_done:
                engine.wake()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sum(others) >= 5
    assert slow.output_token_ids == expected_output(slow)
    assert quick.output_token_ids == expected_output(quick)
