"""What a step's report says about its shape: as it was planned, though its requests have moved."""

from __future__ import annotations

import asyncio

from pdserve.clock import ManualClock
from pdserve.engine.engine import Engine
from pdserve.engine.interface import StepReport
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.scheduler import Queues
from pdserve.perf_model import StepRow, StepShape
from tests.requests import make_request
from tests.unit.engine.fakes import FakeRunner, QuietObserver, decode_policy


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
    async with asyncio.timeout(5):
        await shapes.is_over.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert shapes.seen == [
        StepShape.of([StepRow(8, 0, is_sampled=False)]),
        StepShape.of([StepRow(5, 8)]),
        StepShape.of([StepRow(1, 13, is_decoding=True)]),
        StepShape.of([StepRow(1, 14, is_decoding=True)]),
    ]
