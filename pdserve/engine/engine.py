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

A device (`Runner.launcher`) goes from one step to the next without the loop, as far as steps can be
foreseen (`foresight.py`):

    result of step k - 1 ──► plan, layout and launch of step k + 1 ──► report of step k - 1
    the device: step k ─────────────────────────────────────────────────────► step k + 1 ──►

There a step begins when the one before it has ended, however early it was launched. Where drafts
are expected to gain more than the wait, step k + 1 is planned with the tokens of step k instead,
and a draft model computes between the two.

With an engine beside it (multiplexed mode), there are two such loops over the same requests, each
with a thread of its own: that of the first engine computes decodes, the other one prompts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from math import inf
from typing import NamedTuple, Protocol, TypeVar

from pdserve.engine.interface import OthersSampled, Runner, Sampled, StepObserver, shape_of
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Policy, Queues, StepRuns
from pdserve.engine.step_ends import STEP_TIME_WEIGHT, StepEnds, StepTimes
from pdserve.engine.steps.launched import StepUnderWay
from pdserve.engine.steps.thread import StepThread
from pdserve.shared.errors import DeadlineExceeded, PdserveError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Turns(Protocol):
    """Whose step is next, where engines of other processes compute on the same cores."""

    def take(self) -> bool:
        """Take the turn, or go on having it; False: another process has it."""
        ...

    def wait(self) -> Callable[[], bool]:
        """Return what waits for it for a while, in the thread that computes: whether it came."""
        ...

    def over(self, *, has_more: bool) -> None:
        """Give it on after a step, unless more is to be computed here and that is more urgent."""
        ...


class _Loop(NamedTuple):
    """What a loop works with."""

    runner: Runner
    observer: StepObserver
    thread: StepThread


class Engine(StepEnds):
    """Runs requests over one model and one KV pool."""

    def __init__(
        self,
        queues: Queues,
        policy: Policy,
        eos_token_ids: frozenset[int],
        beside: Engine | None = None,
    ) -> None:
        """As EngineCore; with `beside`, its loop runs beside that of the other engine."""
        super().__init__(queues, policy, eos_token_ids, beside)
        self._other = beside
        if beside is not None:
            beside._other = self
        self.on_idle: Callable[[], None] = lambda: None  # called when there is nothing to compute
        self.turns: Turns | None = None  # None: the cores are its own
        self._wake = asyncio.Event()
        self.pool.on_release(self._wake.set)
        self._thread: StepThread | None = None  # from its first use to the end of `run`
        self.step: Sequence[Scheduled] | None = None  # that is being computed
        self._unfit: list[tuple[Request, PdserveError]] = []  # not reported yet
        self._is_stopping = False
        self._gap_s = 0.0  # of a device between two steps, if the second is not launched ahead

    # ---- verbs: those of the core, which also wake the loop --------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request for prefill here, and for decode unless it is a prefill leg."""
        super().submit(request)
        self.wake()

    def adopt(self, request: Request) -> None:
        """Start decoding a request whose block table already holds its prompt's KV."""
        super().adopt(request)
        self.wake()

    def cancel(self, request_id: str) -> bool:
        """Stop a request and free its blocks, now or when the step that uses them has ended."""
        was_here = super().cancel(request_id)
        self.wake()
        return was_here

    def fail(self, request: Request, error: PdserveError) -> None:
        """Report a request as failed that cannot even be submitted."""
        self._unfit.append((request, error))
        self.wake()

    def wake(self) -> None:
        """Make the loop plan again: something that the policy depends on has changed."""
        self._wake.set()
        if self._other is not None:
            self._other._wake.set()

    def stop(self) -> None:
        """Have `run` return when the step that is being computed is over."""
        self._is_stopping = True
        self._wake.set()

    # ---- the loop ------------------------------------------------------------------------------

    async def run(self, runner: Runner, observer: StepObserver) -> None:
        """Run steps until cancelled or told to stop; when there is no work, wait for more.

        Raises:
            NodeSick: too many steps have failed, or the device has.
        """
        thread = self.started_thread()
        loop = _Loop(runner, observer, thread)
        step = self._step
        if runner.launcher is not None:
            step = self._launched_steps
        self._is_stopping = False
        try:
            while not self._is_stopping:
                self._wake.clear()
                waited_s = 0.0 if self.turns is None else await self._take_turn(self.turns, loop)
                await self._compute_drafts(loop)
                now_s = self._clock.now()
                self._drop_unfit(observer)
                self._drop_expired(now_s, observer)
                rows = self.begin_step()
                if self.queues.preemptions.to_recall:
                    self._recall(observer)
                if rows:
                    await step(rows, now_s - waited_s, loop)  # the wait is part of its time
                    self._wake_other()
                else:
                    self._turn_over(has_more=False)
                    self._report(observer)
                    self._last_end_s = None
                    self.on_idle()
                    await self._idle()
        finally:
            self._report(observer)  # the last step may be over, but its report deferred
            self._thread = None
            thread.close()
            self._turn_over(has_more=False)

    @property
    def has_thread(self) -> bool:
        """Whether the thread that computes steps is there."""
        return self._thread is not None and self._thread.is_alive

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call a function in the thread that computes steps, before the first or between two.

        A device that runs ahead may be computing meanwhile what the thread has launched before.
        """
        return await self.started_thread().submit(function).result

    def started_thread(self) -> StepThread:
        """Return the thread that computes steps, from now to the end of `run`."""
        if self._thread is None:
            self._thread = StepThread()
        return self._thread

    async def _take_turn(self, turns: Turns, loop: _Loop) -> float:
        """Wait until nobody else computes, if there may be something to compute; returns seconds.

        What is planned then has what came meanwhile.
        """
        queues = self.queues
        if not (queues.running or queues.waiting) or turns.take():
            return 0.0
        began_s = self._clock.now()
        self._report(loop.observer)  # nobody is to wait for what has been computed
        while not (self._is_stopping or await loop.thread.submit(turns.wait()).result):
            pass
        return self._clock.now() - began_s

    def _turn_over(self, *, has_more: bool) -> None:
        if self.turns is not None:
            self.turns.over(has_more=has_more)

    async def _idle(self) -> None:
        """Wait to be woken, or until the next deadline of a request that is waiting for blocks."""
        wait_s = self.next_deadline_s - self._clock.now()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s if wait_s < inf else None):
                await self._wake.wait()

    def _wake_other(self) -> None:
        """Have the other loop look at what a step has changed.

        Prompts have become streams, or streams were preempted, or one more step has passed since.
        """
        if self._other is not None and (self._is_beside or self.queues.waiting):
            self._other._wake.set()

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

    async def _compute_drafts(self, loop: _Loop) -> None:
        """Compute drafts for the next step, while nobody is in one; its time is not the step's."""
        drafts = self.draft()
        if drafts is None:
            return
        started_s = self._clock.now()
        computation = loop.thread.submit(drafts)
        self.step = []  # nobody's, so that it is seen if this never ends
        await computation.begun
        self._report(loop.observer)
        await computation.result
        self.step = None
        if self._last_end_s is not None:
            self._last_end_s += self._clock.now() - started_s

    async def _step(self, rows: list[Scheduled], planned_s: float, loop: _Loop) -> None:
        """Compute a step in one go."""
        progress = self._progress(rows, loop.observer)
        started_s, model_before_s = self._clock.now(), loop.runner.model_s
        try:
            step = loop.thread.submit(partial(self._compute, loop.runner.prepare(rows, progress)))
        except Exception as error:  # noqa: BLE001  one bad step must not end the node
            self._fail(rows, error, loop.observer)
            return
        self.step = rows
        await step.begun
        self._report(loop.observer)
        shape = shape_of(rows)
        loop.runner.foresee(rows)
        try:
            sampled, ended_s = await step.result
        except OthersSampled as error:
            self.step = None
            self._fail(rows, error, loop.observer)
            is_here = self.are_in_step(rows)
            if not any(is_here):
                return
            rows, sampled = list(compress(rows, is_here)), list(compress(error.sampled, is_here))
            ended_s = self._clock.now()
        except Exception as error:  # noqa: BLE001  one bad step must not end the node
            self.step = None
            self._fail(rows, error, loop.observer)
            return
        self.step = None
        self._turn_over(has_more=bool(self.queues.running or self.queues.waiting))
        times = StepTimes(planned_s, started_s, ended_s, loop.runner.model_s - model_before_s)
        await self._end(rows, sampled, shape, times, loop.observer)

    # ---- steps on a device ---------------------------------------------------------------------

    async def _launched_steps(self, rows: list[Scheduled], planned_s: float, loop: _Loop) -> None:
        """Launch a step, and then others, each while the one before runs, as far as foreseen."""
        launcher = loop.runner.launcher
        assert launcher is not None, "the caller knows"
        progress = self._progress(rows, loop.observer)
        try:
            prepared = launcher.prepare(rows, progress)
        except Exception as error:  # noqa: BLE001  one bad step must not end the node
            self._fail(rows, error, loop.observer)
            return
        newest = step = StepUnderWay(rows, shape_of(rows), prepared, self._clock, planned_s)
        self.step = rows
        try:
            launch = loop.thread.submit(step.launch)
            await launch.begun
            self._report(loop.observer)
            loop.runner.foresee(rows)
            await launch.result
            self._note_gap(step)
            while True:
                ahead = self._launched_ahead(step, loop.thread)
                newest = ahead or step
                if not await self._until_end(step, ahead, loop) or ahead is None:
                    return
                step = ahead
        except BaseException:
            loop.thread.submit(newest.settle)  # the thread does not end before the device is done
            raise

    def _note_gap(self, step: StepUnderWay) -> None:
        """Learn for how long a device has waited for a step of decodes that has been launched."""
        if step.shape.is_decode and self._last_end_s is not None:
            gap_s = self._clock.now() - self._last_end_s
            self._gap_s += STEP_TIME_WEIGHT * (gap_s - self._gap_s)

    def _launched_ahead(self, step: StepUnderWay, thread: StepThread) -> StepUnderWay | None:
        """Launch the step after this one, which is under way; None if it cannot be foreseen."""
        if self._is_stopping or step.error is not None:
            return None
        if not step.shape.is_decode or not step.prepared.can_be_followed:
            return None
        # What is guessed of those that have ended before it would be kept for ever.
        if self.awaits(list(compress(step.rows, self.are_in_step(step.rows))), self._gap_s):
            return None
        now_s = self._clock.now()
        try:
            with self.step_ahead(step.rows, now_s) as rows:
                if not rows:
                    return None
                shape, prepared = shape_of(rows), step.prepared.prepare_next(rows)
        except StepRuns:
            return None
        except Exception:  # it is planned again, and may fail then
            log.debug("a step could not be prepared ahead", exc_info=True)
            return None
        ahead = StepUnderWay(rows, shape, prepared, self._clock, now_s)
        thread.submit(ahead.launch)
        return ahead

    async def _until_end(self, step: StepUnderWay, ahead: StepUnderWay | None, loop: _Loop) -> bool:
        """Wait until a step has ended; False if it has failed, and the one ahead is dropped."""
        model_before_s = loop.runner.model_s
        self.step = step.rows
        result = loop.thread.submit(step.result)
        await result.begun
        self._report(loop.observer)
        self._drop_unfit(loop.observer)
        try:
            sampled, ended_s = await result.result
        except Exception as error:  # noqa: BLE001  one bad step must not end the node
            if ahead is not None:
                await loop.thread.submit(ahead.settle).result
            self.step = None
            rows = list(compress(step.rows, self.are_in_step(step.rows)))
            self._fail(rows, error, loop.observer)
            return False
        self.step = None
        is_here = self.are_in_step(step.rows)
        rows, sampled = list(compress(step.rows, is_here)), list(compress(sampled, is_here))
        model_s = loop.runner.model_s - model_before_s
        times = StepTimes(step.planned_s, step.started_s, ended_s, model_s)
        await self._end(rows, sampled, step.shape, times, loop.observer)
        if ahead is not None:
            ahead.started_s = ended_s  # the device has turned to it
        return True

    def _compute(self, compute: Callable[[], Sampled]) -> tuple[Sampled, float]:
        """Compute a step, in the thread; return what was sampled and when.

        The time is taken here because the event loop may only get to the result later.
        """
        return compute(), self._clock.now()
