"""The step loop with a fake model: what is planned, reported and freed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.engine import Engine
from pdserve.engine.interface import StepReport
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.protocol import FinishReason
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import (
    GrammarFailed,
    NoTokenLeft,
    PdserveError,
    RequestsFailed,
    UnusableLogits,
)
from tests.fakes.runner import (
    FakeRunner,
    Observer,
    decode_policy,
    expected_output,
    prefill_policy,
)
from tests.matrix import examples
from tests.requests import make_request

BLOCK = 4


@asynccontextmanager
async def running_engine(
    num_blocks: int, budget: int = 16, batch: int = 8, *, prefix_cache: bool = True
) -> AsyncIterator[tuple[Engine, FakeRunner, Observer]]:
    pool = BlockPool(num_blocks, BLOCK, prefix_cache=prefix_cache)
    engine = Engine(Queues(pool, ManualClock()), decode_policy(budget, batch), frozenset())
    runner, observer = FakeRunner(BLOCK), Observer()
    task = asyncio.create_task(engine.run(runner, observer))
    try:
        yield engine, runner, observer
        await asyncio.sleep(0)
        assert pool.num_free == num_blocks, "blocks were lost"
        pool.check_integrity()
        assert engine.num_requests == 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@settings(max_examples=examples(25))
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.booleans()), min_size=1, max_size=10
    ),
    num_blocks=st.integers(11, 40),
    budget=st.integers(1, 20),
)
def test_output_does_not_depend_on_room_chunks_or_company(
    prompts: list[tuple[int, int, bool]], num_blocks: int, budget: int
) -> None:
    """With little room requests preempt each other, and all still get their tokens."""

    async def scenario() -> None:
        async with running_engine(num_blocks, budget) as (engine, _, observer):
            requests = [
                make_request([7] * n if shared else n, max_tokens=m) for n, m, shared in prompts
            ]
            for request in requests:
                engine.submit(request)
            await observer.until(lambda: len(observer.done) == len(requests))
            for request in requests:
                assert request.output_token_ids == expected_output(request)
                assert request.finish_reason is FinishReason.LENGTH

    asyncio.run(scenario())


async def test_an_idle_engine_does_nothing() -> None:
    async with running_engine(8) as (engine, runner, _):
        for _ in range(20):
            await asyncio.sleep(0)
        assert runner.steps == []
        assert engine.num_steps == 0


async def test_chunks_respect_the_budget_and_decodes_come_first() -> None:
    async with running_engine(40, budget=5) as (engine, runner, observer):
        short = make_request(3, max_tokens=8)
        engine.submit(short)
        await observer.until(lambda: short.output_token_ids)
        long = make_request(17, max_tokens=1)
        engine.submit(long)
        await observer.until(lambda: len(observer.done) == 2)
        mixed = [step for step in runner.steps if len(step) == 2]
        assert mixed, "the long prompt had to share steps with the decode"
        assert all(step[0] == (short.request_id, 1) for step in mixed)
        assert all(sum(n for _, n in step) <= 5 for step in runner.steps)


async def test_a_repeated_prompt_is_found_in_the_prefix_cache() -> None:
    async with running_engine(40) as (engine, _, observer):
        first, second = make_request(13), make_request(13)
        for request in (first, second):
            engine.submit(request)
            await observer.until(lambda r=request: r.request_id in observer.done)
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == 12  # three full blocks; the last token is computed
        assert second.output_token_ids == first.output_token_ids


async def test_a_wholly_cached_prompt_still_computes_its_last_token() -> None:
    async with running_engine(40) as (engine, _, observer):
        for _ in range(2):
            request = make_request(12)
            engine.submit(request)
            await observer.until(lambda r=request: r.request_id in observer.done)
        assert request.num_cached_tokens == 8


async def test_salts_keep_prompts_apart() -> None:
    async with running_engine(40) as (engine, _, observer):
        for salt in ("a", "b"):
            request = make_request(13, salt=salt)
            engine.submit(request)
            await observer.until(lambda r=request: r.request_id in observer.done)
            assert request.num_cached_tokens == 0


@pytest.mark.parametrize("when", ["waiting", "running"])
async def test_cancel_frees_the_blocks(when: str) -> None:
    async with running_engine(10, budget=4) as (engine, _, observer):
        request = make_request(20, max_tokens=16)
        engine.submit(request)
        if when == "running":
            await observer.until(lambda: observer.reports)
        assert engine.cancel(request.request_id)
        assert not engine.cancel(request.request_id)
        follower = make_request(30, max_tokens=2)  # needs nearly all of the pool
        engine.submit(follower)
        await observer.until(lambda: follower.request_id in observer.done)
        assert follower.output_token_ids == expected_output(follower)


async def test_cancelled_during_a_step_it_is_freed_after_it() -> None:
    async with running_engine(10) as (engine, runner, observer):
        request = make_request(8, max_tokens=20)
        engine.submit(request)
        while not runner.steps:  # the step has begun, in the engine's thread
            await asyncio.sleep(0)
        engine.cancel(request.request_id)
        other = make_request(4, max_tokens=1)
        engine.submit(other)
        await observer.until(lambda: other.request_id in observer.done)


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), StopIteration("boom")]
)  # a future takes no StopIteration
async def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(error: Exception) -> None:
    async with running_engine(20) as (engine, runner, observer):
        runner.error = error
        bad = make_request(5)
        engine.submit(bad)
        await observer.until(lambda: observer.failed)
        assert observer.failed[0][0] is bad
        assert "the engine's step failed" in str(observer.failed[0][1])
        good = make_request(5)
        engine.submit(good)
        await observer.until(lambda: good.request_id in observer.done)


@pytest.mark.parametrize("kind", [UnusableLogits, NoTokenLeft, GrammarFailed])
async def test_a_step_fails_only_the_requests_that_are_named(
    kind: type[RequestsFailed], caplog: pytest.LogCaptureFixture
) -> None:
    """And clients cannot have tracebacks logged."""
    async with running_engine(20) as (engine, runner, observer):
        bad, good = make_request(5), make_request(6)
        runner.error = kind("why", [bad.request_id])
        engine.submit(bad)
        engine.submit(good)
        await observer.until(lambda: good.request_id in observer.done)
        assert [request for request, _ in observer.failed] == [bad]
        assert good.output_token_ids == expected_output(good)
    assert [bool(record.exc_info) for record in caplog.records] == [kind is UnusableLogits]


async def test_a_prefill_leg_ends_with_token_one_and_its_blocks_can_be_kept() -> None:
    pool = BlockPool(10, BLOCK)
    engine = Engine(Queues(pool, ManualClock()), prefill_policy(16, 8), frozenset())
    kept: list[int] = []

    class Keeper(Observer):
        def step_done(self, report: StepReport) -> None:
            kept.extend(report.rows[0].request.block_table)
            pool.retain(kept)
            super().step_done(report)

    observer = Keeper()
    task = asyncio.create_task(engine.run(FakeRunner(BLOCK), observer))
    request = make_request(10, leg_token_limit=1)
    engine.submit(request)
    await observer.until(lambda: observer.done)
    await asyncio.sleep(0)
    assert request.finish_reason is None
    assert len(request.output_token_ids) == 1
    assert pool.num_free == 10 - 3
    pool.release(kept)
    assert pool.num_free == 10
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_adopted_request_decodes_at_the_next_step() -> None:
    async with running_engine(20) as (engine, runner, observer):
        model = make_request(9, max_tokens=5)
        expected = expected_output(model)
        reserved = engine.reserve(10, [])
        assert reserved is not None
        request = make_request(
            9,
            max_tokens=5,
            output_token_ids=expected[:1],
            num_computed_tokens=9,
            block_table=reserved[0],
        )
        engine.adopt(request)
        await observer.until(lambda: observer.done)
        assert request.output_token_ids == expected
        assert runner.steps[0] == [(request.request_id, 1)]


async def test_room_is_not_given_past_those_who_wait() -> None:
    async with running_engine(10) as (engine, _, observer):
        big = make_request(30, max_tokens=8)
        engine.submit(big)
        assert engine.reserve(4, []) is None  # somebody waits already
        await observer.until(lambda: observer.reports)
        assert engine.reserve(12, []) is None  # 8 of 10 blocks are taken, one to grow into
        await observer.until(lambda: observer.done)


async def test_layers_are_heard_in_order_and_before_the_end_of_their_step() -> None:
    async with running_engine(20, budget=6) as (engine, _, observer):
        observer.layer_ends = (1, 3)
        request = make_request(10, max_tokens=1)
        engine.submit(request)
        await observer.until(lambda: observer.done)
        step = [("planned", 1), ("layers", 1), ("layers", 3), ("done", 1)]
        assert observer.heard == step * 2


async def test_a_step_that_fails_has_told_of_its_layers() -> None:
    """They are computed again, for the requests that it did not fail for."""
    async with running_engine(20) as (engine, runner, observer):
        observer.layer_ends = (2,)
        bad, good = make_request(5), make_request(6, max_tokens=1)
        execute = runner.execute

        def fail_late(*args: Any) -> Any:
            result = execute(*args)
            if len(runner.steps) == 1:
                raise UnusableLogits("NaN", [bad.request_id])
            return result

        runner.execute = fail_late  # type: ignore[assignment,method-assign]
        engine.submit(bad)
        engine.submit(good)
        await observer.until(lambda: good.request_id in observer.done)
        first = [("planned", 2), ("layers", 2)]
        assert observer.heard == [*first, ("planned", 1), ("layers", 2), ("done", 1)]


async def test_decodes_are_reported_while_the_next_step_runs_all_else_at_once() -> None:
    async with running_engine(20) as (engine, _, observer):
        request = make_request(10, max_tokens=4)
        engine.submit(request)
        await observer.until(lambda: observer.done)
        prompt = [("planned", 1), ("done", 1)]  # somebody waits for token 1
        streaming = [("planned", 1), ("planned", 1), ("done", 1), ("planned", 1), ("done", 1)]
        assert observer.heard == [*prompt, *streaming, ("done", 1)], "the last one ends it"


async def test_nothing_stays_unreported_when_no_step_follows() -> None:
    class Idle:
        def plan(self, queues: Queues) -> list[Scheduled]:
            return []

    async with running_engine(20) as (engine, _, observer):
        request = make_request(5, max_tokens=6)
        policy = engine.policy

        def stop_planning(report: StepReport) -> None:
            if len(observer.reports) == 1:  # this is the second; the third step is running
                engine.policy = Idle()
            Observer.step_done(observer, report)

        observer.step_done = stop_planning  # type: ignore[method-assign]
        engine.submit(request)
        await observer.until(lambda: len(observer.reports) == 3)
        assert len(request.output_token_ids) == 3
        engine.policy = policy
        engine.wake()
        await observer.until(lambda: observer.done)


async def test_nothing_stays_unreported_when_the_engine_is_stopped() -> None:
    engine = Engine(Queues(BlockPool(20, BLOCK), ManualClock()), decode_policy(16, 8), frozenset())
    runner, observer = FakeRunner(BLOCK), Observer()
    stopping = asyncio.get_running_loop().create_future()
    prepare = runner.prepare

    def stop_at_third(*args: Any) -> Any:
        if len(runner.steps) == 2:
            task.cancel()  # before the second step is reported
            stopping.set_result(len(observer.reports))
        return prepare(*args)

    runner.prepare = stop_at_third  # type: ignore[assignment,method-assign]
    engine.submit(make_request(5, max_tokens=100))
    task = asyncio.create_task(engine.run(runner, observer))
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert await stopping == 1
    assert len(observer.reports) == 2


async def test_what_was_sampled_is_heard_before_a_deadline_passes() -> None:
    class Slow(Observer):
        def step_done(self, report: StepReport) -> None:
            self.heard.append(("tokens", len(request.output_token_ids)))

        def requests_failed(self, requests: list[Request], error: PdserveError) -> None:
            self.heard.append(("failed", len(request.output_token_ids)))
            super().requests_failed(requests, error)

    class LateRunner(FakeRunner):
        def execute(
            self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
        ) -> list[SampledToken | None]:
            clock.advance(1.0)
            return super().execute(rows, progress)

    clock, observer = ManualClock(), Slow()
    engine = Engine(Queues(BlockPool(20, BLOCK), clock), decode_policy(16, 8), frozenset())
    request = make_request(5, max_tokens=100, targets=Targets(deadline_s=2.5))
    engine.submit(request)
    task = asyncio.create_task(engine.run(LateRunner(BLOCK), observer))
    await observer.until(lambda: observer.failed)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    said = [entry for entry in observer.heard if entry[0] != "planned"]
    assert said == [("tokens", 1), ("tokens", 2), ("tokens", 3), ("failed", 3)]


async def test_a_step_that_cannot_be_prepared_fails_its_requests_after_the_report_before_it() -> (
    None
):
    async with running_engine(20) as (engine, runner, observer):
        request = make_request(5, max_tokens=100)
        prepare, heard = runner.prepare, observer.heard

        def fail_third(*args: Any) -> Any:
            if heard.count(("planned", 1)) == 3:
                raise AssertionError("a bug")
            return prepare(*args)

        def failed(requests: list[Request], error: PdserveError) -> None:
            assert heard[-1] == ("done", 1)
            Observer.requests_failed(observer, requests, error)

        runner.prepare = fail_third  # type: ignore[assignment,method-assign]
        observer.requests_failed = failed  # type: ignore[method-assign]
        engine.submit(request)
        await observer.until(lambda: observer.failed)
        assert "a bug" in str(observer.failed[0][1])
        assert heard == [("planned", 1), ("done", 1), ("planned", 1), ("planned", 1), ("done", 1)]


async def test_the_engine_s_thread_is_one_before_and_while_it_runs() -> None:
    engine = Engine(Queues(BlockPool(20, BLOCK), ManualClock()), decode_policy(16, 8), frozenset())
    before = await engine.in_thread(threading.get_ident)
    assert before != threading.get_ident()

    idents: set[int | None] = set()

    class Witness(FakeRunner):
        def execute(
            self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
        ) -> list[SampledToken | None]:
            idents.add(threading.get_ident())
            return super().execute(rows, progress)

    observer = Observer()
    task = asyncio.create_task(engine.run(Witness(BLOCK), observer))
    engine.submit(make_request(5))
    await observer.until(lambda: observer.done)
    assert idents == {before}
    assert await engine.in_thread(threading.get_ident) == before
    with pytest.raises(ValueError, match="not in the loop"):
        await engine.in_thread(partial(_raise, ValueError("not in the loop")))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert before not in {thread.ident for thread in threading.enumerate()}


def _raise(error: Exception) -> None:
    raise error


async def test_what_a_policy_keeps_out_is_measured() -> None:
    clock, pool = ManualClock(), BlockPool(10, BLOCK)
    queues = Queues(pool, clock)
    small, large = make_request(4, leg_token_limit=1), make_request(20, leg_token_limit=1)
    queues.waiting += [small, large]
    policy = prefill_policy(100, 8, num_kept_free=5)
    assert [row.request for row in policy.plan(queues)] == [small]
    assert queues.held_back.is_running
    clock.advance(2.0)
    small.num_computed_tokens = 4
    small.output_token_ids = [1]
    queues.remove(small)
    assert [row.request for row in policy.plan(queues)] == [large], "alone, it may take them all"
    assert not queues.held_back.is_running
    clock.advance(1.0)
    assert queues.held_back.seconds == 2.0
    huge = make_request(40, leg_token_limit=1)
    queues.waiting.append(huge)
    policy.plan(queues)
    assert not queues.held_back.is_running, "the pool has no room for it, whatever the policy is"
    queues.remove(large)
    queues.remove(huge)
    assert pool.num_free == 10
