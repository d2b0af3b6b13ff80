"""What comes of a step: its tokens or its failure, and who hears of it.

A request that makes its steps fail is dropped with them. It is sent again once or twice at most, so
a row of failures that no step interrupts is the machine's: the node is sick. Some errors need no
second one: CUDA answers every call after them with the same error, until the process ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from pdserve.engine.core import EngineCore
from pdserve.engine.interface import OthersSampled, Sampled, StepObserver, StepReport
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Scheduled
from pdserve.engine.scheduler import Policy, Queues
from pdserve.measured.perf_model import StepShape
from pdserve.protocol import Sickness
from pdserve.shared.errors import (
    GrammarFailed,
    NodeSick,
    NoTokenLeft,
    PdserveError,
    RequestsFailed,
    UnusableLogits,
)

FAILURES_IN_A_ROW: Final = 5

# What CUDA, torch and Triton write of errors after which a process's context is lost. Others, such
# as "out of memory" or "invalid argument", leave it as it was.
_LOST_CONTEXT: Final = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "misaligned address",
    "illegal instruction",
    "illegal address",
    "invalid program counter",
    "hardware stack error",
    "uncorrectable",  # ECC or NVLINK
    "context is destroyed",
    "device is busy or unavailable",
    "device unavailable",
    "unknown error",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step needed more memory than there was; a smaller one may not."""
    # torch's own class is not imported: simulations drive this loop without torch.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def is_device_fault(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, says that the GPU's context is lost."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if ("cuda" in text or "nvlink" in text) and any(lost in text for lost in _LOST_CONTEXT):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_by_requests(error: Exception) -> bool:
    """Whether requests have caused it that are known. Logits that are no distribution may be the
    machine's: those of a request alone stop with it.
    """
    is_named = isinstance(error, RequestsFailed) and bool(error.request_ids)
    return is_named and not isinstance(error, UnusableLogits)


class FailedSteps:
    """Counts steps that failed in a row, through no request's fault that is known."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def succeeded(self) -> None:
        """A step was computed."""
        self._in_a_row = 0

    def failed(self, error: Exception) -> None:
        """A step was not computed.

        Raises:
            NodeSick: no further one will be, either.
        """
        if _is_by_requests(error):
            return
        self._in_a_row += 1
        told = f"{type(error).__name__}: {error}"
        if isinstance(error, NodeSick):
            raise error
        if is_device_fault(error):
            raise NodeSick(f"{Sickness.DEVICE_FAULT}: {told}") from error
        if self._in_a_row >= FAILURES_IN_A_ROW:
            raise NodeSick(
                f"{Sickness.STEPS_FAIL}: {self._in_a_row} in a row, the last one with {told}"
            ) from error


log = logging.getLogger(__name__)

STEP_TIME_WEIGHT = 0.1  # of the newest step in the moving average


class StepTimes(NamedTuple):
    """Of one step, on the engine's clock."""

    planned_s: float
    started_s: float  # on a device not before the end of the step before
    ended_s: float
    model_s: float  # time spent in the model itself


class StepEnds(EngineCore):
    """Applies and reports what steps compute, or fails their requests."""

    def __init__(
        self,
        queues: Queues,
        policy: Policy,
        eos_token_ids: frozenset[int],
        beside: EngineCore | None = None,
    ) -> None:
        super().__init__(queues, policy, eos_token_ids, beside)
        self._is_beside = beside is not None
        self.step_time_s = 0.0  # moving average
        self.num_steps = 0
        self._last_end_s: float | None = None  # end of the previous step; None after idling
        self._clock = queues.clock
        self._unreported: StepReport | None = None  # of the last step, if deferred
        self._failures = FailedSteps()

    async def _end(
        self,
        rows: list[Scheduled],
        sampled: Sampled,
        shape: StepShape,
        times: StepTimes,
        observer: StepObserver,
    ) -> None:
        """Apply a step that has been computed; report it now, or when the next one runs."""
        self._failures.succeeded()
        sampled = self.accepted(rows, sampled)
        done = self.end_step(rows, sampled, times.ended_s)
        self._record_step_time(times.ended_s - times.started_s)
        overhead_s = self._period_s(times.planned_s) - times.model_s
        self._unreported = StepReport(
            rows,
            sampled,
            times.started_s,
            times.model_s,
            max(0.0, overhead_s),
            shape,
            of_prompts=self._is_beside,
        )
        if done or not shape.is_decode:
            self._report(observer)
            for request in done:
                self.forget(request)
            if done and not shape.is_decode:
                await asyncio.sleep(0)  # what was sent is written now, not after the next plan

    def _fail(self, rows: list[Scheduled], error: Exception, observer: StepObserver) -> None:
        """Fail the requests that caused the error, or all if unknown; the others are replanned.

        Or they stay in the step (`are_in_step`), if they have tokens, and states that have gone on:
        else anybody could have those of all others computed anew, by asking for what cannot be.

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
        if len(failed) < len(rows) and self.pool.state_blocks and isinstance(error, OthersSampled):
            for request in failed:
                self.forget(request)
        else:
            # Without its mask, no step begins.
            self.abandon_step(rows, failed, was_computed=not isinstance(error, GrammarFailed))
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

    def _period_s(self, planned_s: float) -> float:
        """Return the period of a step that has just ended; record its end for the next one."""
        began_s = planned_s if self._last_end_s is None else self._last_end_s
        self._last_end_s = self._clock.now()
        return self._last_end_s - began_s

    def _record_step_time(self, duration_s: float) -> None:
        self.num_steps += 1
        if self.num_steps == 1:
            self.step_time_s = duration_s
        else:
            self.step_time_s += STEP_TIME_WEIGHT * (duration_s - self.step_time_s)
