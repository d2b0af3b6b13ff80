"""Steps that fail through no request's fault end an engine; those of a bad request do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from pdserve.engine.engine import Engine
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.engine.step_ends import FAILURES_IN_A_ROW, FailedSteps, is_device_fault
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import (
    GrammarFailed,
    NodeSick,
    NoTokenLeft,
    PdserveError,
    RequestsFailed,
    UnusableLogits,
)
from tests.fakes.runner import FakeRunner, Observer, decode_policy, expected_output
from tests.requests import make_request

ASSERTED = RuntimeError(
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
)
LOST = [
    ASSERTED,
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
]
KEPT = [
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: invalid argument"),
    RuntimeError("an illegal memory access, they say"),  # of whom nobody knows
    ValueError("anything else"),
    UnusableLogits("the logits are no distribution", ["a"]),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_context_is_recognised(error: Exception) -> None:
    assert is_device_fault(error)
    wrapped = PdserveError("a step failed")
    wrapped.__cause__ = error
    assert is_device_fault(wrapped)
    with pytest.raises(NodeSick, match=r"^device_fault: RuntimeError: "):
        FailedSteps().failed(error)


@pytest.mark.parametrize("error", KEPT, ids=str)
def test_other_errors_leave_the_device_as_it_was(error: Exception) -> None:
    assert not is_device_fault(error)
    FailedSteps().failed(error)


@pytest.mark.parametrize("kind", [RequestsFailed, NoTokenLeft, GrammarFailed])
def test_steps_that_failed_by_known_requests_are_not_counted(kind: type[RequestsFailed]) -> None:
    failures = FailedSteps()
    for _ in range(10 * FAILURES_IN_A_ROW):
        failures.failed(kind("why", ["a"]))


@pytest.mark.parametrize("error", [RequestsFailed("why", []), UnusableLogits("why", ["a"])])
def test_errors_that_may_be_the_machines_are_counted(error: RequestsFailed) -> None:
    """Such as those of weights that have become wrong: every request's logits are unusable."""
    failures = FailedSteps()
    for _ in range(FAILURES_IN_A_ROW - 1):
        failures.failed(error)
    with pytest.raises(NodeSick, match=r"^steps_fail: 5 in a row, .*: why"):
        failures.failed(error)


# ---- in the engine -----------------------------------------------------------------------------


class FailingRunner(FakeRunner):
    """Fails the steps, by number, for which `error_of` returns an error."""

    def __init__(self, error_of: Callable[[int], Exception | None]) -> None:
        super().__init__(block_size=4)
        self.error_of = error_of

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        self.error = self.error_of(len(self.steps))
        return super().execute(rows, progress)


async def run_one_by_one(
    error_of: Callable[[int], Exception | None], num_requests: int
) -> tuple[int, NodeSick | None]:
    """One-step requests, each sent when the one before has ended; (steps, why it ended)."""
    engine = Engine(Queues(BlockPool(64, 4), ManualClock()), decode_policy(8, 4), frozenset())
    runner, observer = FailingRunner(error_of), Observer()
    running = asyncio.create_task(engine.run(runner, observer))
    try:
        for number in range(num_requests):
            engine.submit(make_request(3, max_tokens=1))
            told = asyncio.create_task(
                observer.until(lambda n=number: len(observer.done) + len(observer.failed) > n)  # type: ignore[misc]
            )
            await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
            if running.done():
                break
        error = running.exception() if running.done() else None
        assert error is None or isinstance(error, NodeSick)
        return len(runner.steps), error
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_engine_whose_every_step_fails_ends() -> None:
    steps, sick = await run_one_by_one(lambda _: ValueError("broken"), 10 * FAILURES_IN_A_ROW)
    assert steps == FAILURES_IN_A_ROW
    assert "steps_fail: 5 in a row, the last one with ValueError: broken" in str(sick)


async def test_one_good_step_in_between_is_enough() -> None:
    """As when a request that breaks its steps comes again and again, beside others."""

    def error_of(number: int) -> Exception | None:
        return None if number % FAILURES_IN_A_ROW == 0 else ValueError("a bad request")

    assert await run_one_by_one(error_of, 6 * FAILURES_IN_A_ROW) == (6 * FAILURES_IN_A_ROW, None)


async def test_a_lost_device_ends_it_at_the_first_step() -> None:
    steps, sick = await run_one_by_one(lambda n: ASSERTED if n == 2 else None, 10)
    assert steps == 3
    assert "device_fault: RuntimeError: CUDA error: device-side assert" in str(sick)


@pytest.mark.parametrize("state_blocks", [0, 2])
async def test_a_step_that_takes_too_much_memory_is_made_smaller(state_blocks: int) -> None:
    """Half of its requests wait, and end later with the tokens that they would have had."""
    clock = ManualClock()
    pool = BlockPool(64, 4, state_blocks=state_blocks)
    engine = Engine(Queues(pool, clock), decode_policy(64, 8), frozenset())
    runner, observer = GreedyRunner(most_rows=3), Observer()
    requests = [make_request([i], max_tokens=6) for i in range(8)]
    running = asyncio.create_task(engine.run(runner, observer))
    for request in requests:
        engine.submit(request)
    async with asyncio.timeout(30):
        await observer.until(lambda: len(observer.done) == len(requests))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not observer.failed
    assert runner.num_refused > 0
    assert [r.output_token_ids for r in requests] == [expected_output(r) for r in requests]
    assert pool.num_free == 64


class GreedyRunner(FakeRunner):
    """Has memory for a few rows only."""

    def __init__(self, most_rows: int) -> None:
        super().__init__(block_size=4)
        self.most_rows = most_rows
        self.num_refused = 0

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        too_many = len(rows) > self.most_rows
        self.num_refused += too_many
        self.error = MemoryError("no memory for so many rows") if too_many else None
        return super().execute(rows, progress)
