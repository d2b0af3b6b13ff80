"""Steps that are launched on a device before the one in front of them has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.core import EngineCore
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.engine import Engine
from pdserve.engine.interface import StepReport
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.protocol import BadWord, FinishReason
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import DeadlineExceeded, NodeSick, NoTokenLeft, PdserveError
from tests.fakes.late_device import LateDevice, LateRunner
from tests.fakes.runner import Observer, decode_policy, expected_output
from tests.matrix import examples
from tests.requests import make_request

BLOCK = 4
EOS = frozenset(range(10, 1010, 9))  # one token of nine


@dataclass
class Running:
    """An engine over such a device, and who hears of it."""

    engine: Engine
    device: LateDevice
    observer: Observer
    clock: ManualClock
    task: asyncio.Task[None]

    def adopt(self, request: Request) -> bool:
        """As a pull does: its KV is written at once, and it decodes at the next step."""
        num_tokens = request.num_prompt_tokens
        reserved = self.engine.reserve(num_tokens + 1, [])
        if reserved is None:
            return False
        request.block_table = reserved[0]
        for position, token in enumerate(request.prompt_token_ids):
            self.device.write(request.block_table, position, token)
        request.output_token_ids = expected_output(request)[:1]
        request.num_computed_tokens = num_tokens
        self.engine.adopt(request)
        return True

    async def until_done(self, *requests: Request) -> None:
        await self.observer.until(
            lambda: all(request.request_id in self.observer.done for request in requests)
        )

    @property
    def steps_ahead(self) -> list[int]:
        """The steps that were launched before the one in front of them was waited for."""
        heard = self.device.heard
        return [
            step
            for index, (what, step) in enumerate(heard)
            if what == "launch" and step and ("wait", step - 1) in heard[index:]
        ]


class Told:
    """A source that knows answers from a place on, in part, and is wrong at every n-th token."""

    name = "told"

    def __init__(self, wrong_each: int, begin: int = 0) -> None:
        self._wrong_each = wrong_each
        self._begin = begin

    def drafter(self, request: Request) -> Told:
        return self

    def propose(self, request: Request, most: int) -> tuple[list[int], int]:
        place = len(request.output_token_ids)
        if place < self._begin:
            return [], 0
        end = place + min(most, place % 5)
        known = enumerate(expected_output(request)[place:end], place)
        return [7 if at % self._wrong_each == 0 else token for at, token in known], 20

    def ended(self, request: Request) -> None:
        """Nothing is kept."""


@asynccontextmanager
async def running(
    num_blocks: int = 40,
    eos: frozenset[int] = frozenset(),
    observer: Observer | None = None,
    batch: int = 8,
    told: Told | None = None,
) -> AsyncIterator[Running]:
    clock, pool = ManualClock(), BlockPool(num_blocks, BLOCK)
    engine = Engine(Queues(pool, clock), decode_policy(16, batch), eos)
    if told is not None:
        speculation = Speculation(pool, lambda shape: 1.0, 64, [told])
        engine.speculate, engine.awaits = speculation, speculation.awaits
    device, observer = LateDevice(BLOCK, lambda: clock.advance(1.0)), observer or Observer()
    task = asyncio.create_task(engine.run(LateRunner(device), observer))
    try:
        yield Running(engine, device, observer, clock, task)
        idle = asyncio.Event()
        engine.on_idle = idle.set
        engine.wake()
        async with asyncio.timeout(30):
            await idle.wait()
        assert not device.launched, "a step was not waited for"
        assert pool.num_free == num_blocks, "blocks were lost"
        pool.check_integrity()
        assert engine.num_requests == 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def up_to_its_end(request: Request, eos: frozenset[int] = EOS) -> list[int]:
    """What it outputs, as a step after the other would."""
    tokens = expected_output(request)
    limit = request.leg_token_limit or len(tokens)
    for count, token in enumerate(tokens[:limit], 1):
        if count >= request.sampling.min_tokens and token in eos:
            return tokens[:count]
    return tokens[:limit]


@dataclass(frozen=True)
class Arrival:
    """A request, after so many reports, and after how many more it is cancelled or limited."""

    after: int
    prompt: int
    is_adopted: bool
    fields: dict[str, Any]
    cancelled_after: int | None
    limited_after: int | None


FIELDS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 20)},
    optional={
        "min_tokens": st.integers(1, 8),
        "presence_penalty": st.just(0.5),  # which the device does not apply, but the engine fears
        "ignore_eos": st.just(False),
    },
)
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        after=st.integers(0, 25),
        prompt=st.integers(1, 18),
        is_adopted=st.booleans(),
        fields=FIELDS,
        cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 12)),
        limited_after=st.one_of(st.none(), st.none(), st.integers(0, 8)),
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=examples(60))
@given(
    arrivals=ARRIVALS,
    num_blocks=st.integers(11, 40),
    batch=st.integers(2, 8),
    most_ahead=st.sampled_from([100, 3]),
    told=st.sampled_from([None, Told(2), Told(3, begin=4), Told(1000, begin=6)]),
)
def test_tokens_are_those_of_one_step_after_the_other(
    arrivals: list[Arrival], num_blocks: int, batch: int, most_ahead: int, told: Told | None
) -> None:
    """Whoever comes, ends, is cancelled, preempted or told to end while two steps are under way."""

    async def scenario() -> None:
        due: list[tuple[int, Callable[[], None]]] = []
        requests: list[tuple[Arrival, Request]] = []
        num_reports = 0

        class Director(Observer):
            def step_done(self, report: StepReport) -> None:
                nonlocal num_reports
                num_reports += 1
                super().step_done(report)
                direct()

        def direct() -> None:
            for number, act in [one for one in due if one[0] <= num_reports]:
                due.remove((number, act))
                act()

        def arrive(arrival: Arrival) -> None:
            request = make_request(arrival.prompt, **arrival.fields)
            adopted = arrival.is_adopted and arrival.fields["max_tokens"] > 1
            adopted = adopted and expected_output(request)[0] not in EOS
            if not (adopted and world.adopt(request)):
                world.engine.submit(request)
            requests.append((arrival, request))
            if arrival.cancelled_after is not None:
                due.append((num_reports + arrival.cancelled_after, lambda: cancel(request)))
            if arrival.limited_after is not None:
                due.append((num_reports + arrival.limited_after, lambda: limit(request)))

        def cancel(request: Request) -> None:
            if world.engine.cancel(request.request_id):
                world.observer.done[request.request_id] = request

        def limit(request: Request) -> None:  # as when another node takes a stream over
            if request.is_decoding and not request.is_done:
                request.leg_token_limit = len(request.output_token_ids) + 1

        due += [(arrival.after, lambda a=arrival: arrive(a)) for arrival in arrivals]
        async with running(num_blocks, EOS, Director(), batch, told) as world:
            world.device.most_ahead = most_ahead
            while due or len(world.observer.done) < len(requests):
                num_reports += world.engine.num_requests == 0  # nothing is reported while idle
                direct()
                world.observer.changed.clear()
                if world.engine.num_requests:
                    async with asyncio.timeout(30):
                        await world.observer.changed.wait()
            for _, request in requests:
                expected = up_to_its_end(request)
                if request.is_cancelled:
                    expected = expected[: len(request.output_token_ids)]
                assert request.output_token_ids == expected

    asyncio.run(scenario())


async def test_the_next_step_is_launched_before_the_last_one_is_waited_for() -> None:
    async with running() as world:
        request = make_request(5, max_tokens=6)
        world.engine.submit(request)
        await world.until_done(request)
        assert request.output_token_ids == expected_output(request)
        prompt = [("launch", 0), ("wait", 0), ("launch", 1)]
        decodes = [one for n in range(2, 6) for one in (("launch", n), ("wait", n - 1))]
        last = [("wait", 5)]  # what ends by its length is not launched again
        assert world.device.heard == [*prompt, *decodes, *last][: len(world.device.heard)]
        assert world.device.heard.count(("wait", 5)) == 1
        assert len(world.device.rows) == 6


async def test_a_device_waits_where_drafts_are_worth_it() -> None:
    """It runs ahead before anything is guessed, and then takes several tokens a step."""
    async with running(told=Told(1000, begin=8)) as world:
        request = make_request(5, max_tokens=30)
        world.engine.submit(request)
        await world.until_done(request)
        assert request.output_token_ids == expected_output(request)
        sizes = [rows[0][1] for rows in world.device.rows[1:]]
        first = next(n for n, size in enumerate(sizes, 1) if size > 1)
        assert first > 6
        assert set(range(2, first - 1)) <= set(world.steps_ahead)
        assert first not in world.steps_ahead
        assert len(sizes) < 20


class Computed(Told):
    """Knows what comes only as far as it was computed, while the device was idle."""

    def __init__(self, world: Running, begin: int) -> None:
        super().__init__(1000)
        self.places: list[int] = []  # output tokens before what was computed
        self._world = world
        self._from = begin

    def plan(self) -> Callable[[], None] | None:
        decoding = self._world.engine.queues.decoding
        if not decoding or not self.awaits(()):
            return None
        place = len(decoding[0].output_token_ids)

        def compute() -> None:
            assert not self._world.device.launched, "it is one device"
            self.places.append(place)

        return compute

    def awaits(self, rows: Sequence[Scheduled], gap_s: float = 0.0) -> bool:
        decoding = self._world.engine.queues.decoding
        return len(decoding[0].output_token_ids) >= self._from

    def propose(self, request: Request, most: int) -> tuple[list[int], int]:
        place = len(request.output_token_ids)
        end = place + min(most, 3)
        known = expected_output(request)[place:end] if place in self.places[-1:] else []
        return known, 20


async def test_a_draft_model_computes_between_two_steps_of_the_device() -> None:
    async with running() as world:
        source = Computed(world, 8)
        engine = world.engine
        engine.speculate = Speculation(engine.pool, lambda shape: 1.0, 64, [source])
        engine.draft, engine.awaits = source.plan, source.awaits
        request = make_request(5, max_tokens=30)
        engine.submit(request)
        await world.until_done(request)
        assert request.output_token_ids == expected_output(request)
        assert world.steps_ahead, "until it is worth it"
        assert len(source.places) > 4
        assert source.places[0] in (8, 9)
        assert len(world.device.rows) < 18


async def test_what_is_hardly_right_stops_no_device() -> None:
    """Nor what would save less than the device waits."""
    for wrong_each, gap_s in ((1, 0.0), (1000, 9.0)):
        pool = BlockPool(40, BLOCK)
        told = Told(wrong_each)
        speculation = Speculation(pool, lambda shape: 1.0, 64, [told])
        request = make_request(5, max_tokens=30)
        request.output_token_ids = expected_output(request)[:4]
        request.num_computed_tokens = request.num_tokens - 1
        request.block_table = pool.allocate(pool.blocks_for(request.num_tokens))
        rows = [Scheduled(request, 1)]
        assert speculation.awaits(rows, 0.0)
        if wrong_each == 1:
            for _ in range(20):
                assert request.guesses is not None
                speculation(rows)
                request.guesses.compared(len(request.draft), 0)
                request.draft = ()
        assert not speculation.awaits(rows, gap_s)


async def test_a_request_that_ends_by_its_own_is_computed_once_in_vain() -> None:
    async with running(eos=EOS) as world:
        short, long = make_request(7, max_tokens=100), make_request(30, max_tokens=100)
        for request in (short, long):
            world.engine.submit(request)
        await world.until_done(short, long)
        for request in (short, long):
            assert request.output_token_ids == up_to_its_end(request)
            assert request.finish_reason is FinishReason.STOP
            rows = [
                row for step in world.device.rows for row in step if row[0] == request.request_id
            ]
            decoded = len(request.output_token_ids) - 1
            assert sum(num_tokens for _, num_tokens in rows) in (
                request.num_prompt_tokens + decoded,  # as it was alone, and nothing was foreseen
                request.num_prompt_tokens + decoded + 1,
            )
        assert world.steps_ahead


class Counted(Told):
    """Knows nothing, and for whom it does."""

    def __init__(self) -> None:
        super().__init__(1, begin=1000)
        self.streams: list[Request] = []

    def drafter(self, request: Request) -> Told:
        self.streams.append(request)
        return self

    def ended(self, request: Request) -> None:
        self.streams.remove(request)


async def test_nothing_is_guessed_of_who_has_ended_before_the_step_that_runs() -> None:
    """Nobody would say that its stream is over: sources would keep what they know of it."""
    sources = Counted()
    async with running(eos=EOS, told=sources) as world:
        requests = [make_request(number, max_tokens=100) for number in (7, 30)]
        for request in requests:
            world.engine.submit(request)
        await world.until_done(*requests)
        assert world.steps_ahead
    assert sources.streams == []


async def test_an_adopted_request_joins_without_a_break() -> None:
    async with running() as world:
        first, second = make_request(5, max_tokens=40), make_request(6, max_tokens=9)
        world.engine.submit(first)
        await world.observer.until(lambda: len(first.output_token_ids) > 5)
        assert world.adopt(second)
        await world.until_done(first, second)
        assert second.output_token_ids == expected_output(second)
        joined = next(n for n, rows in enumerate(world.device.rows) if len(rows) == 2)
        assert {joined, joined + 1} <= set(world.steps_ahead)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"bad_words": [BadWord(token_ids=[1, 2])]},
        {"grammar": "the test's"},
    ],
)
async def test_steps_that_need_tokens_on_the_host_wait_for_them(fields: dict[str, Any]) -> None:
    async with running() as world:
        request = make_request(5, max_tokens=6, **fields)
        world.engine.submit(request)
        await world.until_done(request)
        assert world.steps_ahead == []


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"bad_words": [BadWord(token_ids=[1])]},
        {"min_tokens": 3},
        {"temperature": 1.0, "seed": 3, "logprobs": 2},
    ],
)
async def test_steps_that_need_none_do_not(fields: dict[str, Any]) -> None:
    async with running() as world:
        request = make_request(5, max_tokens=6, **fields)
        world.engine.submit(request)
        await world.until_done(request)
        assert world.steps_ahead == [2, 3, 4, 5]


async def test_a_prompt_that_waits_is_not_run_ahead_of() -> None:
    async with running() as world:
        first, second = make_request(5, max_tokens=40), make_request(6, max_tokens=2)
        world.engine.submit(first)
        await world.observer.until(lambda: len(first.output_token_ids) > 5)
        world.engine.submit(second)
        num_launched = len(world.device.rows)
        await world.until_done(first, second)
        mixed = next(n for n, rows in enumerate(world.device.rows) if ("r", 6) and len(rows) == 2)
        assert mixed <= num_launched + 1, "it waits for the steps that are under way, and no more"
        assert mixed not in world.steps_ahead


async def test_a_step_that_cannot_be_followed_is_planned_once_and_so_is_the_next() -> None:
    """Of two rows. Those of one run ahead, before another request joins and when it has left."""
    async with running() as world:
        world.device.most_ahead = 1
        plans: list[int] = []
        plan = world.engine.policy.plan

        def counted(queues: Queues) -> list[Scheduled]:
            rows = plan(queues)
            plans.append(len(rows))
            return rows

        world.engine.policy.plan = counted  # type: ignore[method-assign]
        first, second = make_request(5, max_tokens=40), make_request(6, max_tokens=9)
        world.engine.submit(first)
        await world.observer.until(lambda: len(first.output_token_ids) > 5)
        num_alone = len(world.steps_ahead)
        assert num_alone
        assert world.adopt(second)
        await world.until_done(first, second)
        for request in (first, second):
            assert request.output_token_ids == expected_output(request)
        sizes = [len(rows) for rows in world.device.rows]
        assert {sizes[step] for step in world.steps_ahead} == {1}
        assert len(world.steps_ahead) > num_alone
        # One more was planned ahead of a step of one row, and could not be prepared.
        assert plans.count(2) == sizes.count(2) + 1


async def test_blocks_of_what_has_ended_are_kept_until_the_device_is_done() -> None:
    """And until then nobody can be given them, though the request is gone."""
    core, device = cores(num_blocks=8), LateDevice(BLOCK)
    request = make_request(5, max_tokens=9)
    core.submit(request)
    step = device.prepare(core.begin_step())
    end(core, step)
    step = device.prepare(core.begin_step())
    step.launch()
    with core.step_ahead(step.scheduled, 0.0) as rows:
        assert request.output_token_ids[-1] == -1
        ahead = step.prepare_next(rows)
    assert len(request.output_token_ids) == 1
    ahead.launch()
    core.cancel(request.request_id)
    assert core.find(request.request_id) is None
    end(core, step)
    assert core.queues.running == []
    assert core.pool.num_free < 8
    assert core.are_in_step(ahead.scheduled) == [False]
    core.end_step([], [], 0.0)
    assert core.pool.num_free == 8


async def test_what_would_preempt_waits_for_the_end_of_the_step() -> None:
    core, device = cores(num_blocks=9), LateDevice(BLOCK)
    requests = [make_request(n, max_tokens=12) for n in (7, 6)]
    for request in requests:
        core.submit(request)
    end(core, device.prepare(core.begin_step()))
    step = device.prepare(core.begin_step())
    step.launch()
    assert core.queues.running == requests
    core.pool.allocate(core.pool.num_free)
    tables = [list(request.block_table) for request in requests]
    with core.step_ahead(step.scheduled, 0.0) as rows:
        assert rows == [], "one needs a block, and there is none"
    assert core.queues.running == requests
    assert [request.block_table for request in requests] == tables
    end(core, step)
    assert len(core.begin_step()) == 1
    assert sum(request.num_preemptions for request in requests) == 1


def cores(num_blocks: int) -> EngineCore:
    return EngineCore(
        Queues(BlockPool(num_blocks, BLOCK), ManualClock()), decode_policy(16, 8), frozenset()
    )


def end(core: EngineCore, step: Any) -> None:
    if step not in step.device.launched:
        step.launch()
    for request in core.end_step(step.scheduled, step.result(), 0.0):
        core.forget(request)


async def test_a_failure_of_one_request_drops_the_step_ahead_and_nothing_else() -> None:
    async with running() as world:
        bad, good = make_request(5, max_tokens=30), make_request(6, max_tokens=30)
        world.device.errors[8] = NoTokenLeft("why", [bad.request_id])
        for request in (bad, good):
            world.engine.submit(request)
        await world.until_done(good)
        assert [request for request, _ in world.observer.failed] == [bad]
        assert good.output_token_ids == expected_output(good)
        assert bad.output_token_ids == expected_output(bad)[: len(bad.output_token_ids)]
        assert ("wait", 9) in world.device.heard, "its blocks are freed after the step ahead"
        assert 9 in world.steps_ahead


@pytest.mark.parametrize("where", ["errors", "launch_errors"])
async def test_an_unknown_failure_fails_all_requests_of_its_step(where: str) -> None:
    async with running() as world:
        getattr(world.device, where)[8] = RuntimeError("boom")
        requests = [make_request(n, max_tokens=30) for n in (5, 6)]
        for request in requests:
            world.engine.submit(request)
        await world.observer.until(lambda: len(world.observer.failed) == 2)
        assert {request for request, _ in world.observer.failed} == set(requests)
        assert {str(error) for _, error in world.observer.failed} == {
            "the engine's step failed: RuntimeError: boom"
        }
        for request in requests:
            num_tokens = len(request.output_token_ids)
            assert request.output_token_ids == expected_output(request)[:num_tokens]
        after = make_request(4, max_tokens=5)
        world.engine.submit(after)
        await world.until_done(after)
        assert after.output_token_ids == expected_output(after)


async def test_a_lost_device_ends_the_engine() -> None:
    engine = Engine(Queues(BlockPool(40, BLOCK), ManualClock()), decode_policy(16, 8), frozenset())
    device = LateDevice(BLOCK)
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    device.errors = dict.fromkeys(range(8, 99), lost)
    engine.submit(make_request(5, max_tokens=30))
    with pytest.raises(NodeSick, match="illegal memory access"):
        async with asyncio.timeout(30):
            await engine.run(LateRunner(device), Observer())
    assert not device.launched


async def test_too_little_memory_for_the_step_ahead_makes_half_of_its_requests_wait() -> None:
    async with running() as world:
        world.device.launch_errors[9] = MemoryError()
        requests = [make_request(n, max_tokens=20) for n in (5, 6)]
        for request in requests:
            world.engine.submit(request)
        await world.until_done(*requests)
        for request in requests:
            assert request.output_token_ids == expected_output(request)
        assert sum(request.num_preemptions for request in requests) == 1


async def test_a_deadline_passes_while_steps_are_ahead() -> None:
    async with running() as world:
        late = make_request(5, max_tokens=1000, targets=Targets(deadline_s=12.5))
        world.engine.submit(late)
        await world.observer.until(lambda: world.observer.failed)
        (failed,) = world.observer.failed
        assert failed[0] is late
        assert isinstance(failed[1], DeadlineExceeded)
        assert 10 <= len(late.output_token_ids) <= 14


async def test_a_request_that_cannot_be_submitted_is_told_while_steps_are_ahead() -> None:
    async with running() as world:
        long, unfit = make_request(5, max_tokens=60), make_request(3)
        world.engine.submit(long)
        await world.observer.until(lambda: len(long.output_token_ids) > 3)
        world.engine.fail(unfit, PdserveError("why"))
        await world.observer.until(lambda: world.observer.failed)
        assert len(long.output_token_ids) < 60
        await world.until_done(long)


async def test_a_step_s_time_is_that_from_the_end_of_the_one_before() -> None:
    """Each takes a second, though it is launched one before."""
    async with running() as world:
        request = make_request(5, max_tokens=9)
        world.engine.submit(request)
        await world.until_done(request)
        assert world.engine.step_time_s == pytest.approx(1.0)
        reports = world.observer.reports
        assert [report.started_s for report in reports] == [float(n) for n in range(9)]
        assert [report.period_s for report in reports] == [1.0] * 9
        assert [report.shape.decode_context for report in reports[1:]] == list(range(6, 14))


async def test_an_engine_that_is_stopped_waits_for_all_that_was_launched() -> None:
    engine = Engine(Queues(BlockPool(40, BLOCK), ManualClock()), decode_policy(16, 8), frozenset())
    device, observer = LateDevice(BLOCK), Observer()
    task = asyncio.create_task(engine.run(LateRunner(device), observer))
    engine.submit(make_request(5, max_tokens=1000))
    await observer.until(lambda: len(observer.reports) > 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert not device.launched
