"""The step loop: plan, prepare, compute, apply, report; over and over while there is work.

The event loop owns every piece of state here (queues, block pool, requests); only what
`Runner.prepare` returns runs in a thread of its own, with the interpreter lock released for most of
it. So nothing needs a lock, and a request can be submitted, adopted or cancelled while a step runs:
what the step is using is left alone until the step is over.

Nothing that can wait stands between two steps. As soon as the model of a step is running:

    report of step k - 1 ──► shape of step k ──► step k + 1 laid out as far as it can be foreseen

But where somebody waits for more than one more token of a stream, the report comes first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Protocol, TypeVar

from pdserve.clock import Clock
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.core import EngineCore
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Policy
from pdserve.engine.step_shape import shape_of
from pdserve.engine.step_thread import StepThread
from pdserve.errors import (
    DeadlineExceeded,
    GrammarFailed,
    NoTokenLeft,
    PdserveError,
    RequestsFailed,
)
from pdserve.perf_model import StepShape

log = logging.getLogger(__name__)

T = TypeVar("T")

STEP_TIME_WEIGHT = 0.1  # of the newest step in the moving average


Sampled = list[SampledToken | None]  # one entry per row; None: it does not reach its end


class Runner(Protocol):
    """Computes steps, one at a time."""

    model_s: float  # spent in the model itself, over all steps

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], Sampled]:
        """Make everything ready for a step; what is returned computes it.

        Called on the event loop, and what it returns once, from a worker thread, before the next
        step is prepared. With `progress`, each number of layers that it asks for is reported, once
        these layers' KV of all rows is in the pool.
        """
        ...

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """Called on the event loop while a step of these rows is computed: there is time to prepare
        for the next one, of which nothing is known yet."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. Requests that are done have left the engine, but still have their blocks
    while the report is being handled: `BlockPool.retain` keeps them longer."""

    rows: list[Scheduled]
    sampled: Sampled
    started_s: float  # when its execution began, on the engine's clock
    model_s: float  # in the model itself
    overhead_s: float  # everything else since the step before, or since there was work again
    shape: StepShape  # as it was planned

    @property
    def period_s(self) -> float:
        """From the end of the step before, or from when there was work again, to its own end."""
        return self.model_s + self.overhead_s


class StepObserver(Protocol):
    """Whoever turns steps into messages: the node."""

    def step_planned(self, rows: Sequence[Scheduled]) -> Sequence[int]:
        """Called on the event loop before each step.

        Returns after how many layers, ascending, `layers_done` is to be called; none: never.
        """
        ...

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        """Called on the event loop while the step runs, if at all: the KV of the rows' tokens is
        in the pool, in the first `num_layers` layers. The requests are as they were before it."""
        ...

    def step_done(self, report: StepReport) -> None:
        """Called on the event loop after each step; once the next one runs, if it was one of
        decodes that all go on. Before anything else that this observer hears of a later step's end.
        """
        ...

    def requests_failed(self, requests: list[Request], error: PdserveError) -> None:
        """These requests were in a step that raised, or their deadline has passed; their blocks are
        free when this returns."""
        ...


class Engine(EngineCore):
    """Runs requests over one model and one KV pool."""

    def __init__(
        self, pool: BlockPool, policy: Policy, clock: Clock, eos_token_ids: frozenset[int]
    ) -> None:
        super().__init__(pool, policy, clock, eos_token_ids)
        self.step_time_s = 0.0  # moving average
        self.num_steps = 0
        self._last_end_s: float | None = None  # of the step before; None after idling
        self._clock = clock
        self._wake = asyncio.Event()
        pool.on_release(self._wake.set)
        self._thread: StepThread | None = None  # from when it is needed to the end of `run`
        self._unreported: StepReport | None = None  # the last step's, while the next one is planned

    # ---- verbs: as the core's, and the loop hears of them ----------------------------------------

    def submit(self, request: Request) -> None:
        """As EngineCore.submit."""
        super().submit(request)
        self._wake.set()

    def adopt(self, request: Request) -> None:
        """As EngineCore.adopt."""
        super().adopt(request)
        self._wake.set()

    def cancel(self, request_id: str) -> bool:
        """As EngineCore.cancel."""
        was_here = super().cancel(request_id)
        self._wake.set()
        return was_here

    def wake(self) -> None:
        """Plan again: something that the policy looks at has changed."""
        self._wake.set()

    # ---- the loop ------------------------------------------------------------------------------

    async def run(self, runner: Runner, observer: StepObserver) -> None:
        """Step until cancelled; without work, wait for a verb to bring some."""
        thread = self._started_thread()
        try:
            while True:
                self._wake.clear()
                planned_at = self._clock.now()
                self._drop_expired(planned_at, observer)
                rows = self.begin_step()
                if rows:
                    await self._step(rows, planned_at, runner, observer, thread)
                else:
                    self._report(observer)
                    self._last_end_s = None
                    await self._idle()
        finally:
            self._report(observer)  # of a step that was over when this was cancelled
            self._thread = None
            thread.close()

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call it in the thread that computes steps: before the first of them, or between two."""
        return await self._started_thread().submit(function).result

    def _started_thread(self) -> StepThread:
        if self._thread is None:
            self._thread = StepThread()
        return self._thread

    async def _idle(self) -> None:
        """Wait for a verb, or for the deadline of somebody who waits for room."""
        wait_s = self.next_deadline_s - self._clock.now()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s if wait_s < inf else None):
                await self._wake.wait()

    def _drop_expired(self, now_s: float, observer: StepObserver) -> None:
        if now_s >= self.next_deadline_s:
            self._report(observer)  # their last tokens come before the error
        for request in self.drop_expired(now_s):
            waited_s = now_s - request.lifecycle.received_s
            error = DeadlineExceeded(
                f"its deadline passed after {waited_s:.3f} s here, "
                f"with {len(request.output_token_ids)} tokens"
            )
            observer.requests_failed([request], error)

    async def _step(
        self,
        rows: list[Scheduled],
        planned_at: float,
        runner: Runner,
        observer: StepObserver,
        thread: StepThread,
    ) -> None:
        progress = self._progress(rows, observer)
        started_s, model_before_s = self._clock.now(), runner.model_s
        try:
            step = thread.submit(partial(self._compute, runner.prepare(rows, progress)))
        except Exception as error:  # noqa: BLE001  one bad step must not end the node
            self._fail(rows, error, observer)
            return
        await step.begun
        self._report(observer)
        shape = shape_of(rows)
        runner.foresee(rows)
        try:
            sampled, ended_s = await step.result
        except Exception as error:  # noqa: BLE001  one bad step must not end the node
            self._fail(rows, error, observer)
            return
        done = self.end_step(rows, sampled, ended_s)
        self._record_step_time(ended_s - started_s)
        model_s = runner.model_s - model_before_s
        overhead_s = self._period_s(planned_at) - model_s
        self._unreported = StepReport(
            rows, sampled, started_s, model_s, max(0.0, overhead_s), shape
        )
        if done or not shape.is_decode:
            self._report(observer)
            for request in done:
                self.forget(request)

    def _period_s(self, planned_at: float) -> float:
        """Of a step that has just ended."""
        began_s = planned_at if self._last_end_s is None else self._last_end_s
        self._last_end_s = self._clock.now()
        return self._last_end_s - began_s

    def _report(self, observer: StepObserver) -> None:
        """What was not reported yet."""
        report, self._unreported = self._unreported, None
        if report is not None:
            observer.step_done(report)

    def _progress(self, rows: Sequence[Scheduled], observer: StepObserver) -> LayerProgress | None:
        ends = observer.step_planned(rows)
        if not ends:
            return None
        loop = asyncio.get_running_loop()

        def done(num_layers: int) -> None:
            # Before the step's own end, which takes the same way to the loop.
            loop.call_soon_threadsafe(observer.layers_done, rows, num_layers)

        return LayerProgress(ends, done)

    def _compute(self, compute: Callable[[], Sampled]) -> tuple[Sampled, float]:
        """In the thread: what was sampled, and when, whenever the event loop hears of it."""
        return compute(), self._clock.now()

    def _fail(self, rows: list[Scheduled], error: Exception, observer: StepObserver) -> None:
        """Give up the requests that the step failed for; the others are planned again."""
        self._report(observer)  # of the step before, if this one could not even be prepared
        if isinstance(error, GrammarFailed | NoTokenLeft):  # clients could fill the log with them
            log.warning("of a step of %d requests: %s", len(rows), error)
        else:
            log.error("a step of %d requests failed", len(rows), exc_info=error)
        failed = [row.request for row in rows]
        if isinstance(error, RequestsFailed) and error.request_ids:
            named = set(error.request_ids)
            failed = [r for r in failed if any(a.request_id in named for a in r.answers)]
        elif not isinstance(error, PdserveError):
            error = PdserveError(f"the engine's step failed: {type(error).__name__}: {error}")
        self.abandon_step(rows, failed)
        observer.requests_failed([r for r in failed if not r.is_cancelled], error)
        for answer in (answer for request in failed for answer in request.answers):
            answer.is_cancelled = True  # whoever keeps something for it lets go

    def _record_step_time(self, duration_s: float) -> None:
        self.num_steps += 1
        if self.num_steps == 1:
            self.step_time_s = duration_s
        else:
            self.step_time_s += STEP_TIME_WEIGHT * (duration_s - self.step_time_s)
