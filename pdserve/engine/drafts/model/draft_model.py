"""The draft model: its runner, its blocks, and the steps in which it drafts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.engine.drafts.model.stream import DraftedStream
from pdserve.engine.interface import Runner, Sampled, shape_of
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Scheduled
from pdserve.measured.perf_model import PerfModel, StepShape
from pdserve.shared.errors import RequestsFailed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded model that guesses for another one."""

    runner: Runner
    pool: BlockPool  # of its KV, which no other node ever has
    block_bytes: int  # of this
    perf: PerfModel  # of its steps
    vocab_size: int  # ids that both models know
    max_model_len: int
    now: Callable[[], float] = time.perf_counter


@dataclass(slots=True)
class DraftSteps:
    """What the model computes before a step: in the thread that computes steps.

    The streams have blocks for it. The real requests are not looked at.
    """

    model: DraftModel
    slices: Sequence[Scheduled]  # of prompts that it does not know yet
    wanted: Sequence[tuple[DraftedStream, int]]  # how many drafts each stream is to have
    asked_s: float  # when this was decided
    lag_s: float = 0.0  # until the thread began
    times: list[tuple[StepShape, float]] = field(default_factory=list)  # what they took
    has_failed: bool = False  # for another reason than one of the requests

    def __call__(self) -> None:
        """Compute them. What fails costs drafts, and nothing else."""
        self.lag_s = self.model.now() - self.asked_s
        rows = [*self.slices, *self._next()]
        try:
            while rows:
                self._step(rows)
                rows = self._next()
        except RequestsFailed as error:
            log.warning("the draft model gives streams up: %s", error)
            for stream, _ in self.wanted:
                if not error.request_ids or stream.shadow.request_id in error.request_ids:
                    stream.is_over = True
        except Exception:
            log.exception("the draft model fails: there are no drafts of it any more")
            self.has_failed = True

    def _next(self) -> list[Scheduled]:
        return [
            Scheduled(stream.shadow, stream.shadow.num_uncomputed_tokens)
            for stream, number in self.wanted
            if len(stream.drafts) < number
        ]

    def _step(self, rows: list[Scheduled]) -> None:
        shape, started_s = shape_of(rows), self.model.now()
        sampled: Sampled = self.model.runner.prepare(rows)()
        self.times.append((shape, self.model.now() - started_s))
        for row, token in zip(rows, sampled, strict=True):
            row.request.num_computed_tokens += row.num_tokens
            if token is not None:
                row.request.output_token_ids.append(token.token_id)
