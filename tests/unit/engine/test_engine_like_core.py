"""The engine, which prepares and reports beside its steps, does what the core does step by step.

Both follow one script of what happens while which step runs. What they plan, sample, free and
report has to be the same, step for step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.core import EngineCore
from pdserve.engine.engine import Engine
from pdserve.engine.interface import StepReport
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import Prompt, SamplingParams
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import PdserveError, UnusableLogits
from tests.fakes.runner import FakeRunner, QuietObserver, decode_policy
from tests.matrix import examples
from tests.unit.engine.batches import BLOCK, assert_same, plain_batch, step_batches

ENDINGS = frozenset(range(10, 1010, 9))  # of what the fake model may say


@dataclass(frozen=True)
class Event:
    """Something that happens while a step runs."""

    kind: str  # submit, prefill (a leg of one token), cancel, fail
    number: int  # prompt tokens, or whose turn it is
    max_tokens: int


@dataclass
class Seen:
    """What one of the two has done."""

    steps: list[tuple[list[tuple[str, int]], int]] = field(default_factory=list)  # rows, free
    outputs: dict[str, list[int]] = field(default_factory=dict)  # as reported
    failed: list[str] = field(default_factory=list)


class Script:
    """Events by the number of the step that they fall into."""

    def __init__(self, events: Sequence[Sequence[Event]]) -> None:
        self.events = events
        self.num_submitted = 0

    def play(self, core: EngineCore, step: int, rows: Sequence[Scheduled]) -> UnusableLogits | None:
        """All of one step; the error that it ends with."""
        error = None
        for event in self.events[step] if step < len(self.events) else ():
            if event.kind in ("submit", "prefill"):
                core.submit(self._request(event))
            elif event.kind == "cancel":
                core.cancel(f"r{event.number % max(1, self.num_submitted)}")
            else:
                request_id = rows[event.number % len(rows)].request.request_id
                error = UnusableLogits("NaN", [request_id])
        return error

    def _request(self, event: Event) -> Request:
        number, self.num_submitted = self.num_submitted, self.num_submitted + 1
        return Request(
            request_id=f"r{number}",
            prompt=Prompt([7 * (number % 3) + n for n in range(event.number)]),
            sampling=SamplingParams(max_tokens=event.max_tokens, temperature=0.0),
            lifecycle=Lifecycle(received_s=float(number)),
            leg_token_limit=1 if event.kind == "prefill" else None,
        )


def play_core(core: EngineCore, script: Script) -> Seen:
    """Step by step, nothing beside anything."""
    seen, runner = Seen(), FakeRunner(BLOCK)
    script.play(core, 0, [])
    step = 0
    while rows := core.begin_step():
        step += 1
        seen.steps.append((_names(rows), core.pool.num_free))
        sampled = runner.execute(rows)
        error = script.play(core, step, rows)
        if error is not None:
            failed = [row.request for row in rows if row.request.request_id in error.request_ids]
            core.abandon_step(rows, failed)
            seen.failed += [r.request_id for r in failed if not r.is_cancelled]
            continue
        done = core.end_step(rows, sampled, 0.0)
        _note(seen, rows, sampled)
        for request in done:
            core.forget(request)
    return seen


class Conductor(FakeRunner):
    """Runs the engine's steps, and has the events of each happen while it runs."""

    def __init__(self, engine: Engine, script: Script, seen: Seen) -> None:
        super().__init__(BLOCK)
        self.batches = step_batches()
        self._engine = engine
        self._script = script
        self._seen = seen
        self._loop = asyncio.get_running_loop()

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], list[SampledToken | None]]:
        self._seen.steps.append((_names(rows), self._engine.pool.num_free))
        assert_same(self.batches.lay_out(rows), plain_batch(rows))
        return super().prepare(rows, progress)

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        self.batches.foresee(rows)

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        sampled = super().execute(rows, progress)
        played = asyncio.run_coroutine_threadsafe(self._play(rows), self._loop)
        error = played.result(30.0)
        if error is not None:
            raise error
        return sampled

    async def _play(self, rows: Sequence[Scheduled]) -> UnusableLogits | None:
        return self._script.play(self._engine, len(self._seen.steps), rows)


class Listener(QuietObserver):
    """What a node would say. A report has to find its requests' blocks as they were."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.heard = asyncio.Event()

    def step_done(self, report: StepReport) -> None:
        for request, _ in report.rows:
            if request.is_done:
                assert request.block_table, "blocks are there while the report is handled"
        _note(self.seen, report.rows, report.sampled)
        self.heard.set()

    def requests_failed(self, requests: list[Request], error: PdserveError) -> None:
        self.seen.failed += [request.request_id for request in requests]
        self.heard.set()


async def play_engine(engine: Engine, script: Script) -> Seen:
    """As it is used."""
    seen = Seen()
    script.play(engine, 0, [])
    listener = Listener(seen)
    task = asyncio.create_task(engine.run(Conductor(engine, script, seen), listener))
    async with asyncio.timeout(20):
        # A request that was cancelled is not counted any more while the step it is in still runs.
        while engine.num_requests or engine.pool.num_free < engine.pool.num_blocks:
            listener.heard.clear()
            await listener.heard.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return seen


def _names(rows: Sequence[Scheduled]) -> list[tuple[str, int]]:
    return [(request.request_id, num_tokens) for request, num_tokens in rows]


def _note(seen: Seen, rows: Sequence[Scheduled], sampled: Sequence[SampledToken | None]) -> None:
    for (request, _), token in zip(rows, sampled, strict=True):
        if token is not None and not request.is_cancelled:
            seen.outputs.setdefault(request.request_id, []).append(token.token_id)


EVENT = st.builds(
    Event,
    st.sampled_from(["submit", "submit", "submit", "prefill", "cancel", "fail"]),
    st.integers(1, 20),
    st.integers(1, 14),
)
FIRST = st.builds(Event, st.just("submit"), st.integers(1, 20), st.integers(1, 14))


@settings(max_examples=examples(60))
@given(
    first=st.lists(FIRST, min_size=1, max_size=4),
    events=st.lists(st.lists(EVENT, max_size=2), max_size=25),
    num_blocks=st.integers(10, 30),
    budget=st.integers(1, 20),
)
def test_the_same_plans_tokens_and_blocks(
    first: list[Event], events: list[list[Event]], num_blocks: int, budget: int
) -> None:
    def made(kind: type[EngineCore]) -> EngineCore:
        queues = Queues(BlockPool(num_blocks, BLOCK), ManualClock())
        return kind(queues, decode_policy(budget, 6), ENDINGS)

    core, engine = made(EngineCore), made(Engine)
    assert isinstance(engine, Engine)
    expected = play_core(core, Script([first, *events]))
    seen = asyncio.run(play_engine(engine, Script([first, *events])))
    assert seen == expected
    assert engine.pool.num_free == core.pool.num_free == num_blocks
    engine.pool.check_integrity()
