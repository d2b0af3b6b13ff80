"""What a step costs besides its model, as counts: unlike times, they are the same on any machine.

Each is exact. One that has gone up says which work has come into the loop; one that has gone down
is to be written down here.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

import numpy as np
import pytest

from kv_transfer.memory import ExportedPool
from kv_transfer.spans.box import BlockRun, whole_box
from kv_transfer.spans.plan import plan_spans
from pdserve.engine.engine import Engine
from pdserve.engine.interface import StepReport, shape_of
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.engine.steps.batches import StepBatches
from pdserve.kv import KvDtype, KvLayout
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import NodeRole, Prompt, SamplingParams, TokenBatch
from pdserve.settings.config import NodeConfig
from pdserve.shared.clock import ManualClock
from pdserve.wire.envelopes import FROM_NODE
from tests.fakes.outbox import RecordingOutbox
from tests.fakes.runner import PlainRunner, QuietObserver, decode_policy
from tests.unit.node.parts import made_parts, made_services

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype=KvDtype.FLOAT32)
NUM_BLOCKS = 512


class Streams:
    """A decode node with so many streams from each of two coordinators, stepped by hand."""

    def __init__(self, num_streams: int) -> None:
        self.num_steps = 0
        self.memory = ExportedPool(NUM_BLOCKS, LAYOUT.block_bytes)
        self.parts = made_parts("n", self.memory, LAYOUT, NodeConfig())
        self.services = made_services(self.parts, NodeRole.DECODE)
        self.links = RecordingOutbox(), RecordingOutbox()
        self.batches = StepBatches(LAYOUT.block_size)
        for number in range(2 * num_streams):
            request = made_stream(f"r{number}", self.parts.engine)
            self.services.legs.open(request.request_id, self.links[number % 2])
            self.parts.engine.adopt(request)

    def step(self) -> None:
        """All that the event loop does for one."""
        engine = self.parts.engine
        rows = engine.begin_step()
        self.services.step_planned(rows)
        self.batches.lay_out(rows)
        shape = shape_of(rows)
        self.batches.foresee(rows)
        self.num_steps += 1
        sampled = [SampledToken(1000 + self.num_steps)] * len(rows)  # no text to be guessed
        assert engine.end_step(rows, sampled, 0.0) == []
        self.services.step_done(StepReport(rows, sampled, 0.0, 0.001, 0.0, shape))

    async def close(self) -> None:
        """Everything."""
        await self.services.close()
        await self.parts.exporter.close()
        await self.parts.puller.close()
        self.memory.close()


def made_stream(request_id: str, engine: Engine) -> Request:
    """That has token 1, and its KV in the first of its blocks."""
    return Request(
        request_id=request_id,
        prompt=Prompt(list(range(17))),
        sampling=SamplingParams(temperature=0.0, max_tokens=200),
        lifecycle=Lifecycle(received_s=0.0),
        output_token_ids=[5],
        num_computed_tokens=17,
        block_table=engine.pool.allocate(2),
    )


def num_calls(function: Callable[[], object]) -> int:
    """Calls of Python functions in it, its own included; not those of hooks of the collector."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # Hypothesis, for one, has a callback
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


async def per_stream(of_step: Callable[[Streams], int]) -> float:
    """How much more a step of many streams has than one of few."""
    few, many = Streams(4), Streams(20)
    for streams in (few, many):
        streams.step()
        streams.step()
    more = of_step(many) - of_step(few)
    await few.close()
    await many.close()
    return more / 32


async def test_python_calls_for_each_row_of_a_step() -> None:
    """Neither planned, nor ended, nor reported."""
    assert await per_stream(lambda streams: num_calls(streams.step)) == 0


async def test_no_python_calls_for_each_row_that_is_laid_out() -> None:
    def laid_out(streams: Streams) -> int:
        rows = streams.parts.engine.begin_step()
        calls = num_calls(lambda: (streams.batches.lay_out(rows), streams.batches.foresee(rows)))
        streams.parts.engine.abandon_step(rows, [])
        return calls

    assert await per_stream(laid_out) == 0


async def test_one_message_for_each_coordinator_and_step() -> None:
    streams = Streams(5)
    for number in range(1, 11):
        streams.step()
        for link in streams.links:
            assert len(link.sent) == number
            batch = link.sent[-1]
            assert isinstance(batch, TokenBatch)
            assert batch.events == [], "tokens with nothing more to say are in columns"
            assert len(batch.token_ids) == 5
    await streams.close()


@pytest.mark.parametrize("work", ["pack", "unpack"])
def test_no_python_calls_for_each_token_of_a_message(work: str) -> None:
    def calls(num_tokens: int) -> int:
        message = TokenBatch(
            request_ids=[f"r{n}" for n in range(num_tokens)],
            indices=list(range(num_tokens)),
            token_ids=list(range(num_tokens)),
        )
        proto = FROM_NODE.wrap(message)
        if work == "pack":
            return num_calls(lambda: FROM_NODE.wrap(message).SerializeToString())
        FROM_NODE.unwrap(proto)  # the first one of a kind also finds out how
        return num_calls(lambda: FROM_NODE.unwrap(proto))

    assert calls(1) == calls(64)


async def test_steady_decoding_is_foreseen_and_takes_no_memory() -> None:
    streams = Streams(8)
    streams.step()
    streams.step()
    num_growths = streams.batches.num_growths
    for _ in range(40):
        streams.step()
    assert (streams.batches.num_foreseen, streams.batches.num_anew) == (41, 1)
    assert streams.batches.num_growths == num_growths
    await streams.close()


async def test_callbacks_of_the_event_loop_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two from the engine's thread, begun and ended, and for each of them the loop's task."""
    loop = asyncio.get_running_loop()
    called: list[str] = []

    def count(name: str) -> None:
        call = getattr(loop, name)

        def counted(*args: object, **kwargs: object) -> object:
            called.append(name)
            return call(*args, **kwargs)

        monkeypatch.setattr(loop, name, counted)

    class Runner(PlainRunner):
        """Whose steps end when the loop has done what it does meanwhile."""

        num_steps = 0
        is_foreseen = threading.Semaphore(0)

        def foresee(self, rows: Sequence[Scheduled]) -> None:
            self.num_steps += 1
            if self.num_steps in (10, 30):
                marks.append(len(called))
            self.is_foreseen.release()

        def execute(
            self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
        ) -> list[SampledToken | None]:
            assert self.is_foreseen.acquire(timeout=30.0)
            return [SampledToken(7)] * len(rows)

    marks: list[int] = []
    count("call_soon")
    count("call_soon_threadsafe")
    pool = BlockPool(NUM_BLOCKS, LAYOUT.block_size)
    engine = Engine(Queues(pool, ManualClock()), decode_policy(64, 8), frozenset())
    for number in range(8):
        engine.adopt(made_stream(f"r{number}", engine))
    observer = _Silent()
    task = asyncio.create_task(engine.run(Runner(), observer))
    async with asyncio.timeout(30):
        await observer.heard_enough.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (marks[1] - marks[0]) / 20 == 4


class _Silent(QuietObserver):
    """An observer."""

    def __init__(self) -> None:
        self.num_reports = 0
        self.heard_enough = asyncio.Event()

    def step_done(self, report: StepReport) -> None:
        self.num_reports += 1
        if self.num_reports == 40:
            self.heard_enough.set()


def test_a_prompt_s_blocks_move_as_one_descriptor() -> None:
    """The pool hands out neighbours, also those that have come back, and the plan joins them."""
    pools = [BlockPool(64, LAYOUT.block_size) for _ in range(2)]
    for pool in pools:
        first, second = pool.allocate(10), pool.allocate(20)
        pool.release(second)
        pool.release(first)
    runs = [BlockRun(LAYOUT, np.array(pool.allocate(30))) for pool in pools]
    num_tokens = 30 * LAYOUT.block_size
    spans = plan_spans(runs[0], runs[1], whole_box(LAYOUT, 0, num_tokens))
    assert spans.shape == (1, 3)
    assert spans[0, 2] == 30 * LAYOUT.block_bytes
