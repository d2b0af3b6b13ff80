"""Two engines over the same requests and blocks: one computes decodes, the other one prompts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.policies.interface import SideBySide, StepPhase
from pdserve.engine.core import EngineCore
from pdserve.engine.engine import Engine
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.shortage import Victims
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Policy, Queues
from pdserve.lifecycle import Targets
from pdserve.settings.config import DecodePolicyName
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import DeadlineExceeded, UnusableLogits
from tests.fakes.runner import FakeRunner, Observer, decode_policy, expected_output
from tests.matrix import examples
from tests.requests import make_request

BLOCK = 4


POLICIES = st.sampled_from(["max-batch", "static"])


def phases(budget: int, name: DecodePolicyName = "max-batch") -> tuple[Policy, Policy]:
    policy = decode_policy(budget, 8, name)
    assert isinstance(policy, SideBySide)
    return StepPhase(policy.plan_decodes), StepPhase(policy.plan_prompts)


# ---- step by step --------------------------------------------------------------------------------


@dataclass
class Step:
    """A step that runs, and what its requests were like when it began."""

    rows: list[Scheduled]
    sampled: list[SampledToken | None]
    before: list[tuple[int, list[int], list[int]]]


def state_of(rows: Sequence[Scheduled]) -> list[tuple[int, list[int], list[int]]]:
    requests = [row.request for row in rows]
    return [(r.num_computed_tokens, [*r.output_token_ids], [*r.block_table]) for r in requests]


class World:
    """Both cores, whose steps begin and end when a test says so."""

    def __init__(
        self, num_blocks: int, budget: int = 16, policy: DecodePolicyName = "max-batch"
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.clock = ManualClock()
        self.queues = Queues(self.pool, self.clock, victims=Victims(3))
        decodes, prompts = phases(budget, policy)
        self.cores = [EngineCore(self.queues, decodes, frozenset())]
        self.cores.append(EngineCore(self.queues, prompts, frozenset(), beside=self.cores[0]))
        self.steps: dict[EngineCore, Step] = {}
        self.runner = FakeRunner(BLOCK)
        self.ended: set[Request] = set()
        self.was_woken = False  # blocks were released: the engines plan again, as in their loops
        self.pool.on_release(self.wake)

    def wake(self) -> None:
        self.was_woken = True

    @property
    def main(self) -> EngineCore:
        return self.cores[0]

    def turn(self, core: EngineCore) -> bool:
        """End the core's step, or begin one; False: there is nothing to do."""
        return self.end(core) if core in self.steps else self.begin(core)

    def begin(self, core: EngineCore) -> bool:
        if core is self.main:
            self.ended.update(core.drop_expired(self.clock.now()))
        rows = core.begin_step()
        if not rows:
            return False
        assert core is not self.main or all(row.request.is_decoding for row in rows)
        self.steps[core] = Step(rows, self.runner.execute(rows), state_of(rows))
        tables = [self.written(step) for step in self.steps.values()]
        assert len(set().union(*tables)) == sum(map(len, tables)), "both write to one block"
        return True

    def written(self, step: Step) -> set[int]:
        """The blocks that a step writes to."""
        found: set[int] = set()
        for request, num_tokens in step.rows:
            end = request.num_computed_tokens + num_tokens
            found.update(
                request.block_table[request.num_computed_tokens // BLOCK : -(-end // BLOCK)]
            )
        return found

    def end(self, core: EngineCore) -> bool:
        step = self.steps.pop(core)
        assert state_of(step.rows) == step.before, "a request was touched while it was computed"
        for request in core.end_step(step.rows, step.sampled, self.clock.now()):
            core.forget(request)
            self.ended.add(request)
        return True

    def fail(self, core: EngineCore, number: int) -> None:
        """Have the core's step fail because of one of its requests."""
        step = self.steps.pop(core, None)
        if step is not None:
            failed = step.rows[number % len(step.rows)].request
            core.abandon_step(step.rows, [failed])
            self.ended.add(failed)

    def finish(self) -> None:
        """Go on until nothing is left to do."""
        for _ in range(5000):
            self.was_woken = False
            did = [self.turn(core) for core in self.cores]
            if not (any(did) or self.was_woken):
                break
        else:
            raise AssertionError("it never ends")
        self.check_empty()

    def check_empty(self) -> None:
        assert [core.num_requests for core in self.cores] == [0, 0]
        assert self.queues.is_empty
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks, "blocks were lost"


ACTIONS = st.one_of(
    st.tuples(st.just("turn"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 12)),
    st.tuples(st.sampled_from(["cancel", "expire", "fail"]), st.integers(0, 20), st.integers(0, 1)),
)


@settings(max_examples=examples(150))
@given(actions=st.lists(ACTIONS, max_size=60), num_blocks=st.integers(11, 24), policy=POLICIES)
def test_whatever_comes_when_requests_are_left_alone_while_they_are_computed(
    actions: list[tuple[str, int, int]], num_blocks: int, policy: DecodePolicyName
) -> None:
    """Also with so little room that streams are preempted, for blocks and for priority."""
    world = World(num_blocks, policy=policy)
    requests: list[Request] = []
    for kind, number, other in actions:
        if kind == "turn":
            world.turn(world.cores[number])
        elif kind == "submit":
            prompt = [7] * number if other % 3 == 0 else number
            targets = Targets(priority=other % 2, deadline_s=1.0 if other == 11 else float("inf"))
            requests.append(make_request(prompt, max_tokens=other, targets=targets))
            world.main.submit(requests[-1])
        elif kind == "fail":
            world.fail(world.cores[other], number)
        elif kind == "expire":
            world.clock.advance(1.0)
        elif requests:
            world.main.cancel(requests[number % len(requests)].request_id)
    world.finish()
    for request in requests:
        if request not in world.ended or not request.is_cancelled:
            whole = expected_output(request)
            assert request.output_token_ids == whole[: len(request.output_token_ids)]
        if request in world.ended and request.finish_reason is not None:
            assert request.output_token_ids == expected_output(request)


def test_a_prompt_becomes_a_stream_where_it_is() -> None:
    world = World(20)
    request = make_request(10, max_tokens=3)
    world.main.submit(request)
    decodes, prompts = world.cores
    assert not world.begin(decodes)
    assert world.begin(prompts)
    assert not world.begin(decodes), "it is computed elsewhere"
    blocks = [*request.block_table]
    world.end(prompts)
    assert world.begin(decodes)
    assert not world.begin(prompts)
    assert request.block_table == blocks
    world.finish()
    assert request.output_token_ids == expected_output(request)


def test_what_the_other_one_computes_is_not_preempted() -> None:
    """A stream needs a block, and all others are those of a prompt that is being computed."""
    world = World(8)
    decodes, prompts = world.cores
    stream = make_request(7, max_tokens=14)
    world.main.submit(stream)
    world.begin(prompts)
    world.end(prompts)
    prompt = make_request([5] * 14, max_tokens=1, targets=Targets(priority=-1))
    world.main.submit(prompt)
    assert world.begin(prompts)
    while world.begin(decodes):
        world.end(decodes)
    assert len(stream.output_token_ids) == 10
    assert stream.num_preemptions == 1, "it gives way itself"
    assert prompt.num_preemptions == 0
    world.finish()
    assert stream.output_token_ids == expected_output(stream)
    assert prompt.output_token_ids == expected_output(prompt)


def test_a_request_that_is_cancelled_keeps_its_blocks_until_its_step_ends() -> None:
    world = World(20)
    decodes, prompts = world.cores
    prompt = make_request(10, max_tokens=3)
    world.main.submit(prompt)
    world.begin(prompts)
    assert world.main.cancel(prompt.request_id)
    world.begin(decodes)
    assert world.pool.num_free < 20
    world.end(prompts)
    world.check_empty()


def test_a_request_that_is_late_keeps_its_blocks_until_its_step_ends() -> None:
    world = World(20)
    decodes, prompts = world.cores
    prompt = make_request(10, max_tokens=3, targets=Targets(deadline_s=1.0))
    world.main.submit(prompt)
    world.begin(prompts)
    world.clock.advance(2.0)
    world.begin(decodes)
    assert prompt.is_cancelled
    assert world.pool.num_free < 20
    world.end(prompts)
    world.check_empty()


# ---- loops ---------------------------------------------------------------------------------------


@asynccontextmanager
async def running(
    num_blocks: int,
    budget: int = 16,
    runners: Sequence[FakeRunner] = (),
    policy: DecodePolicyName = "max-batch",
) -> AsyncIterator[tuple[Engine, list[FakeRunner], Observer]]:
    pool, observer = BlockPool(num_blocks, BLOCK), Observer()
    decodes, prompts = phases(budget, policy)
    engine = Engine(Queues(pool, ManualClock()), decodes, frozenset())
    beside = Engine(engine.queues, prompts, frozenset(), beside=engine)
    both = [*runners] or [FakeRunner(BLOCK), FakeRunner(BLOCK)]
    pairs = zip((engine, beside), both, strict=True)
    task = asyncio.gather(*(loop.run(runner, observer) for loop, runner in pairs))
    try:
        yield engine, both, observer
        await asyncio.sleep(0)
        assert pool.num_free == num_blocks, "blocks were lost"
        pool.check_integrity()
        assert engine.num_requests == beside.num_requests == 0
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
    policy=POLICIES,
)
def test_output_does_not_depend_on_room_chunks_or_company(
    prompts: list[tuple[int, int, bool]], num_blocks: int, budget: int, policy: DecodePolicyName
) -> None:
    """And neither loop sleeps while there is something for it to do."""

    async def scenario() -> None:
        async with running(num_blocks, budget, policy=policy) as (engine, _, observer):
            requests = [
                make_request([7] * n if shared else n, max_tokens=m) for n, m, shared in prompts
            ]
            for request in requests:
                engine.submit(request)
            await observer.until(lambda: len(observer.done) == len(requests))
            for request in requests:
                assert request.output_token_ids == expected_output(request)

    asyncio.run(scenario())


class HeldRunner(FakeRunner):
    """Its steps wait for a test."""

    def __init__(self) -> None:
        super().__init__(BLOCK)
        self.began, self.may_end = threading.Event(), threading.Event()

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        self.began.set()
        assert self.may_end.wait(30)
        return super().execute(rows, progress)


async def test_streams_go_on_while_a_prompt_is_computed() -> None:
    held = HeldRunner()
    held.may_end.set()
    async with running(40, runners=[FakeRunner(BLOCK), held]) as (engine, _, observer):
        stream = make_request(5, max_tokens=20)
        engine.submit(stream)
        await observer.until(lambda: stream.output_token_ids)
        held.began.clear()
        held.may_end.clear()
        prompt = make_request(9, max_tokens=2)
        engine.submit(prompt)
        await asyncio.to_thread(held.began.wait, 30)
        await observer.until(lambda: stream.request_id in observer.done)
        assert not prompt.output_token_ids
        held.may_end.set()
        await observer.until(lambda: prompt.request_id in observer.done)
        assert prompt.output_token_ids == expected_output(prompt)


async def test_a_step_that_fails_ends_nothing_beside_it() -> None:
    async with running(40) as (engine, (_, prompts), observer):
        stream = make_request(5, max_tokens=30)
        engine.submit(stream)
        await observer.until(lambda: stream.output_token_ids)
        bad = make_request(9, max_tokens=2)
        prompts.error = UnusableLogits("NaN", [bad.request_id])
        engine.submit(bad)
        await observer.until(lambda: observer.failed and stream.request_id in observer.done)
        assert [request for request, _ in observer.failed] == [bad]
        assert stream.output_token_ids == expected_output(stream)


async def test_a_deadline_that_passes_during_a_prompt_is_kept() -> None:
    held = HeldRunner()
    async with running(40, runners=[FakeRunner(BLOCK), held]) as (engine, _, observer):
        late = make_request(9, max_tokens=2, targets=Targets(deadline_s=1.0))
        engine.submit(late)
        await asyncio.to_thread(held.began.wait, 30)
        engine.queues.clock.advance(2.0)  # type: ignore[attr-defined]
        engine.wake()
        await observer.until(lambda: observer.failed)
        assert isinstance(observer.failed[0][1], DeadlineExceeded)
        held.may_end.set()
        await observer.until(lambda: observer.reports or engine.pool.num_free == 40)


async def test_a_report_says_which_of_them_has_computed_a_step() -> None:
    """Also that of a prompt that came back and lacks one token, as a decode does."""
    async with running(40) as (engine, _, observer):
        stream = make_request([7] * BLOCK, max_tokens=3)
        engine.submit(stream)
        await observer.until(lambda: stream.request_id in observer.done)
        assert [report.of_prompts for report in observer.reports] == [True, False, False]
        output = expected_output(stream)
        back = make_request([7] * BLOCK, max_tokens=3, output_token_ids=output[:1])
        engine.submit(back)
        await observer.until(lambda: back.request_id in observer.done)
        assert back.output_token_ids == output
        first, second = observer.reports[3:]
        assert first.shape.is_decode
        assert first.of_prompts
        assert not second.of_prompts
