"""The step loop: plan, prepare, compute, apply and report steps while there is work.

The event loop owns all state here (queues, block pool, requests). Only the function returned by
`Runner.prepare` runs in a separate thread, with the interpreter lock released for most of the time.
So no locks are needed, and requests can be submitted, adopted or cancelled while a step runs: the
requests and blocks that the step uses are not touched until it is over.

Work that can be deferred is kept out of the gap between two steps. It is done as soon as the model
is running step k:

    report of step k - 1 ──► shape of step k ──► step k + 1 laid out as far as it can be foreseen

The report is not deferred if the step finished a request or contained a chunk of a prompt. If a
prompt ended with it, a client and another node wait for what was sent: the loop has a turn to write
it before it plans the next step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import TypeVar

from pdserve.engine.core import EngineCore
from pdserve.engine.faults import FailedSteps, is_out_of_memory
from pdserve.engine.interface import Runner, Sampled, StepObserver, StepReport
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Policy, Queues
from pdserve.engine.steps.shape import shape_of
from pdserve.engine.steps.thread import StepThread
from pdserve.errors import (
    DeadlineExceeded,
    GrammarFailed,
    NodeSick,
    NoTokenLeft,
    PdserveError,
    RequestsFailed,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

STEP_TIME_WEIGHT = 0.1  # of the newest step in the moving average


class Engine(EngineCore):
    """Runs requests over one model and one KV pool."""

    def __init__(self, queues: Queues, policy: Policy, eos_token_ids: frozenset[int]) -> None:
        super().__init__(queues, policy, eos_token_ids)
        self.step_time_s = 0.0  # moving average
        self.num_steps = 0
        self.on_idle: Callable[[], None] = lambda: None  # called when there is nothing to compute
        self._last_end_s: float | None = None  # end of the previous step; None after idling
        self._clock = queues.clock
        self._wake = asyncio.Event()
        self.pool.on_release(self._wake.set)
        self._thread: StepThread | None = None  # from its first use to the end of `run`
        self._unreported: StepReport | None = None  # of the last step, if deferred
        self.step: Sequence[Scheduled] | None = None  # that is being computed
        self._failures = FailedSteps()
        self._unfit: list[tuple[Request, PdserveError]] = []  # not reported yet

    # ---- verbs: those of the core, which also wake the loop --------------------------------------

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

    def fail(self, request: Request, error: PdserveError) -> None:
        """Report a request as failed that cannot even be submitted."""
        self._unfit.append((request, error))
        self._wake.set()

    def wake(self) -> None:
        """Make the loop plan again: something that the policy depends on has changed."""
        self._wake.set()

    # ---- the loop ------------------------------------------------------------------------------

    async def run(self, runner: Runner, observer: StepObserver) -> None:
        """Run steps until cancelled; when there is no work, wait for more.

        Raises:
            NodeSick: too many steps have failed, or the device has.
        """
        thread = self._started_thread()
        try:
            while True:
                self._wake.clear()
                planned_s = self._clock.now()
                self._drop_unfit(observer)
                self._drop_expired(planned_s, observer)
                rows = self.begin_step()
                if self.queues.preemptions.to_recall:
                    self._recall(observer)
                if rows:
                    await self._step(rows, planned_s, runner, observer, thread)
                else:
                    self._report(observer)
                    self._last_end_s = None
                    self.on_idle()
                    await self._idle()
        finally:
            self._report(observer)  # the last step may be over, but its report deferred
            self._thread = None
            thread.close()

    @property
    def has_thread(self) -> bool:
        """Whether the thread that computes steps is there."""
        return self._thread is not None and self._thread.is_alive

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call a function in the thread that computes steps, before the first or between two."""
        return await self._started_thread().submit(function).result

    def _started_thread(self) -> StepThread:
        if self._thread is None:
            self._thread = StepThread()
        return self._thread

    async def _idle(self) -> None:
        """Wait to be woken, or until the next deadline of a request that is waiting for blocks."""
        wait_s = self.next_deadline_s - self._clock.now()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s if wait_s < inf else None):
                await self._wake.wait()

    def _drop_unfit(self, observer: StepObserver) -> None:
        unfit, self._unfit = self._unfit, []
        for request, error in unfit:
            observer.requests_failed([request], error)

    def _drop_expired(self, now_s: float, observer: StepObserver) -> None:
        if now_s >= self.next_deadline_s:
            self._report(observer)  # send the requests' last tokens before the error
        for request in self.drop_expired(now_s):
            waited_s = now_s - request.lifecycle.received_s
            error = DeadlineExceeded(
                f"its deadline passed after {waited_s:.3f} s here, "
                f"with {len(request.output_token_ids)} tokens"
            )
            observer.requests_failed([request], error)

    def _recall(self, observer: StepObserver) -> None:
        preemptions = self.queues.preemptions
        requests, preemptions.to_recall = preemptions.to_recall, []
        for request in requests:
            observer.recall(request)

    async def _step(
        self,
        rows: list[Scheduled],
        planned_s: float,
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
        self.step = rows
        await step.begun
        self._report(observer)
        shape = shape_of(rows)
        runner.foresee(rows)
        try:
            sampled, ended_s = await step.result
        except Exception as error:  # noqa: BLE001  one bad step must not end the node
            self.step = None
            self._fail(rows, error, observer)
            return
        self.step = None
        self._failures.succeeded()
        done = self.end_step(rows, sampled, ended_s)
        self._record_step_time(ended_s - started_s)
        model_s = runner.model_s - model_before_s
        overhead_s = self._period_s(planned_s) - model_s
        self._unreported = StepReport(
            rows, sampled, started_s, model_s, max(0.0, overhead_s), shape
        )
        if done or not shape.is_decode:
            self._report(observer)
            for request in done:
                self.forget(request)
            if done and not shape.is_decode:
                await asyncio.sleep(0)  # what was sent is written now, not after the next plan

    def _period_s(self, planned_s: float) -> float:
        """Return the period of a step that has just ended; record its end for the next one."""
        began_s = planned_s if self._last_end_s is None else self._last_end_s
        self._last_end_s = self._clock.now()
        return self._last_end_s - began_s

    def _report(self, observer: StepObserver) -> None:
        """Report the last step, if that has not been done yet."""
        report, self._unreported = self._unreported, None
        if report is not None:
            observer.step_done(report)

    def _progress(self, rows: Sequence[Scheduled], observer: StepObserver) -> LayerProgress | None:
        ends = observer.step_planned(rows)
        if not ends:
            return None
        loop = asyncio.get_running_loop()

        def done(num_layers: int) -> None:
            # Callbacks run in order, so this one runs before that of the step's end.
            loop.call_soon_threadsafe(observer.layers_done, rows, num_layers)

        return LayerProgress(ends, done)

    def _compute(self, compute: Callable[[], Sampled]) -> tuple[Sampled, float]:
        """Compute a step, in the thread; return what was sampled and when.

        The time is taken here because the event loop may only get to the result later.
        """
        return compute(), self._clock.now()

    def _fail(self, rows: list[Scheduled], error: Exception, observer: StepObserver) -> None:
        """Fail the requests that caused the error, or all if unknown; the others are replanned.

        Raises:
            NodeSick: see `FailedSteps.failed`.
        """
        self._report(observer)  # the previous step is still unreported if `prepare` raised
        if is_out_of_memory(error) and self._shrink(rows):
            log.warning("a step of %d requests took too much memory: half of them wait", len(rows))
            return
        # No traceback for errors that clients can cause at will: they could fill the log.
        if isinstance(error, GrammarFailed | NoTokenLeft):
            failed_ids = ", ".join(error.request_ids)
            log.warning("%s failed, of a step of %d requests: %s", failed_ids, len(rows), error)
        elif isinstance(error, NodeSick):
            log.error("a step of %d requests failed: %s", len(rows), error)
        else:
            log.error("a step of %d requests failed", len(rows), exc_info=error)
        self._failures.failed(error)
        failed = [row.request for row in rows]
        if isinstance(error, RequestsFailed) and error.request_ids:
            named = set(error.request_ids)
            failed = [r for r in failed if any(a.request_id in named for a in r.answers)]
        elif not isinstance(error, PdserveError):
            error = PdserveError(f"the engine's step failed: {type(error).__name__}: {error}")
        self.abandon_step(rows, failed)
        observer.requests_failed([r for r in failed if not r.is_cancelled], error)
        for answer in (answer for request in failed for answer in request.answers):
            answer.is_cancelled = True  # so that anyone holding state for the answer releases it

    def _shrink(self, rows: list[Scheduled]) -> bool:
        """Drop a failed step and preempt half of its requests; False if none may be preempted."""
        requests = [row.request for row in rows if not row.request.is_cancelled]
        victims = self.queues.victims.in_order(requests)[: len(requests) // 2]
        if not victims:
            return False
        self.abandon_step(rows, [])
        for victim in victims:
            self.queues.preempt(victim)
        return True

    def _record_step_time(self, duration_s: float) -> None:
        self.num_steps += 1
        if self.num_steps == 1:
            self.step_time_s = duration_s
        else:
            self.step_time_s += STEP_TIME_WEIGHT * (duration_s - self.step_time_s)
