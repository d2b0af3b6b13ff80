"""The two sides of the step loop: what computes steps, and what receives their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.measured.perf_model import StepShape, chunk_pairs
from pdserve.shared.errors import NoTokenLeft, PdserveError


def shape_of(rows: Sequence[Scheduled]) -> StepShape:
    """Return the shape of a plan. The requests must be as they are before the step."""
    num_tokens = num_sampled = pairs = context = 0
    for request, num_row_tokens in rows:
        num_tokens += num_row_tokens
        if request.draft:  # it is decoding, and its context is read once
            num_sampled += num_row_tokens
            context += request.num_computed_tokens + num_row_tokens
            continue
        num_before = request.num_computed_tokens
        num_output = len(request.output_token_ids)
        num_uncomputed = len(request.prompt_token_ids) + num_output - num_before
        num_sampled += num_row_tokens == num_uncomputed and request.sampling.max_tokens > 0
        if request.sampling.prompt_logprobs is not None and not num_output:
            last = len(request.prompt_token_ids) - 1
            num_sampled += min(num_before + num_row_tokens, last) - num_before
        if num_output and num_uncomputed == 1:  # it is decoding
            context += num_before + 1
        else:
            pairs += chunk_pairs(num_row_tokens, num_before)
    return StepShape(num_tokens, num_sampled, pairs, context)


Sampled = list[SampledToken | None]  # one entry per row; None if nothing was sampled for it


class OthersSampled(NoTokenLeft):
    """Some requests have no token left; all others of the step have theirs."""

    def __init__(
        self, message: str, request_ids: Sequence[str], sampled: Sequence[SampledToken | None]
    ) -> None:
        """`sampled`: of each draw, or row; of those requests, what is none."""
        super().__init__(message, request_ids)
        self.sampled = list(sampled)


class LaunchedStep(Protocol):
    """A step that a device computes. It is called by the thread that computes steps, in order."""

    def launch(self) -> None:
        """Have the device compute it behind the steps before, and wait for nothing."""
        ...

    def result(self) -> Sampled:
        """Wait until the device is done with it. Called once, after `launch`."""
        ...

    @property
    def can_be_followed(self) -> bool:
        """Whether `prepare_next` of a step of as many rows would work. Asked once it is launched.

        Not behind drafts: how many tokens they bring is known at the end only.

        To plan a step has effects, such as what it is charged for, so it is not tried in vain.
        """
        ...

    def prepare_next(self, rows: Sequence[Scheduled]) -> LaunchedStep:
        """Prepare the step after this one, which is launched, and has decodes only, as that one.

        Called on the event loop. The requests are as `foresight.foreseen` has them, until this
        returns.

        Raises:
            StepRuns: there are too many rows, so it is planned again when this one has ended.
        """
        ...


class Launcher(Protocol):
    """Computes steps on a device, so that the next one can be launched before the last has ended.

    Two steps are under way at most.
    """

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> LaunchedStep:
        """Prepare a step that is launched first and awaited later."""
        ...


class Runner(Protocol):
    """Computes steps, one at a time."""

    @property
    def launcher(self) -> Launcher | None:
        """The same, if a device computes the steps, and can be ahead; else None."""
        ...

    @property
    def model_s(self) -> float:
        """Total time spent in the model itself, over all steps.

        Of a step on a device, it is all time from its launch, or from the end of the step before if
        that is later, to its end.
        """
        ...

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], Sampled]:
        """Prepare a step; return the function that computes it.

        Called on the event loop. The returned function is called once, from a worker thread, before
        the next step is prepared. With `progress`, each of the layer counts in `progress.ends` is
        reported once the KV of all rows is in the pool for that many layers.
        """
        ...

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """Prepare for the next step as far as possible, before its plan is known.

        Called on the event loop while a step of these rows is being computed.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    Finished requests still hold their blocks while the report is being handled; use
    `BlockPool.retain` to keep the blocks longer.
    """

    rows: list[Scheduled]
    sampled: Sampled
    started_s: (
        float  # when its execution began, on the engine's clock: not before the last one's end
    )
    model_s: float  # time spent in the model itself
    overhead_s: float  # all other time since the previous step ended, or since idling ended
    shape: StepShape  # as it was planned
    of_prompts: bool = False  # by an engine that computes them beside another one's decodes

    @property
    def period_s(self) -> float:
        """Time from the end of the previous step, or of idling, to the end of this step."""
        return self.model_s + self.overhead_s


class StepObserver(Protocol):
    """Receives the results of steps. The node implements it and turns them into messages."""

    def step_planned(self, rows: Sequence[Scheduled]) -> Sequence[int]:
        """Return the layer counts, ascending, after which to call `layers_done`; empty for never.

        Called on the event loop before each step, except those that are launched while another one
        runs: these are of decodes, and report no layers.
        """
        ...

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        """Handle that the KV of the rows' tokens is in the pool for the first `num_layers` layers.

        Called on the event loop, normally while the step runs. The requests are still as they were
        before the step.
        """
        ...

    def step_done(self, report: StepReport) -> None:
        """Handle the report of a step. Called on the event loop after each step.

        For a step of decodes only, none of which finished, the call may come once the next step is
        running. It always comes before any call about the end of a later step. Rows of requests
        that ended before the step did are not in its report.
        """
        ...

    def requests_failed(self, requests: list[Request], error: PdserveError) -> None:
        """Handle requests whose step raised, whose deadline passed, or that cannot be submitted.

        Their blocks are free when this returns.
        """
        ...

    def recall(self, request: Request) -> None:
        """Fetch the KV of a preempted request for which there is room again, then submit it.

        `shortage.CouldFetch` has said that there is something to fetch.
        """
        ...
