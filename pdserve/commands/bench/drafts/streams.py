"""Decodes a batch of streams with a node's engine, and nothing else of a node."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.commands.bench.drafts.played import PlayedRunner
from pdserve.commands.bench.drafts.texts import Text
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.engine import Engine
from pdserve.engine.interface import Runner, StepReport
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Lifecycle, Targets
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import Prompt, SamplingParams
from pdserve.shared.clock import SystemClock
from pdserve.shared.errors import PdserveError

_CHUNK = 512  # tokens of a prompt in a step
_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Decoded:
    """What came of a batch."""

    answers: list[list[int]]
    num_tokens: int  # in steps of decodes
    seconds: float  # that these took, all of the engine's work included
    num_steps: int

    @property
    def tokens_per_s(self) -> float:
        """Of the whole batch."""
        return self.num_tokens / self.seconds


class Streams:
    """Runs batches over one pool, in which prompts are kept: the second time they cost nothing."""

    def __init__(
        self, runner: Runner, pool: BlockPool, perf: PerfModel, *, plays: bool, tenant: str = ""
    ) -> None:
        """
        Args:
            plays: the texts' answers, instead of the model's own.
            tenant: whose former answers are drafts; empty: nobody's are.
        """
        self._tenant = tenant
        self._runner = runner
        self._pool = pool
        self._perf = perf
        self._plays = plays

    def decode(
        self, texts: Sequence[Text], tokens: int, speculation: Speculation | None
    ) -> Decoded:
        """Compute the prompts one after the other, then decode all together, `tokens` of each.

        Raises:
            PdserveError: a step has failed, or a prompt has no room.
        """
        requests = [new_request(text, tokens, self._tenant) for text in texts]
        runner = self._runner
        if self._plays:
            ids = [request.request_id for request in requests]
            answers = [text.answer for text in texts]
            runner = PlayedRunner(runner, dict(zip(ids, answers, strict=True)))
        queues = Queues(self._pool, SystemClock())
        engine = Engine(queues, _PromptsFirst(), frozenset())
        if speculation is not None:
            engine.speculate = speculation
        for request in requests:
            engine.submit(request)
        engine.on_idle = engine.stop
        watch = _Watch(self._perf, speculation)
        asyncio.run(engine.run(runner, watch))
        if watch.num_steps == 0:
            raise PdserveError("nothing was decoded: the pool has no room for a prompt")
        said = [request.output_token_ids for request in requests]
        return Decoded(said, watch.num_tokens, watch.seconds, watch.num_steps)


class _PromptsFirst:
    """Implements `Policy`: prompts alone, then all streams."""

    def plan(self, queues: Queues) -> list[Scheduled]:
        for request in [*queues.waiting]:
            queues.admit(request)
        for request in queues.running:
            if not request.is_decoding:
                return [Scheduled(request, min(_CHUNK, request.num_uncomputed_tokens))]
        return queues.plan_decodes(len(queues.running))


class _Watch:
    """Implements `StepObserver`: adds up steps of decodes, and corrects predictions as nodes do."""

    def __init__(self, perf: PerfModel, speculation: Speculation | None) -> None:
        self.num_tokens = self.num_steps = 0
        self.seconds = 0.0
        self._perf = perf
        self._speculation = speculation

    def step_planned(self, rows: Sequence[Scheduled]) -> Sequence[int]:
        """As StepObserver.step_planned."""
        return ()

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        """As StepObserver.layers_done: never called."""

    def step_done(self, report: StepReport) -> None:
        """As StepObserver.step_done."""
        self._perf.observe(report.shape, report.period_s)
        if self._speculation is not None:
            self._speculation.observe(report.shape, report.period_s)
        if report.shape.is_decode:
            self.num_steps += 1
            self.num_tokens += sum(1 + len(token.after) for token in report.sampled if token)
            self.seconds += report.period_s

    def requests_failed(self, requests: list[Request], error: PdserveError) -> None:
        """As StepObserver.requests_failed."""
        raise error

    def recall(self, request: Request) -> None:
        """As StepObserver.recall: nothing is elsewhere."""


def new_request(text: Text, tokens: int, tenant: str = "") -> Request:
    """Return a request for an answer of so many tokens."""
    return Request(
        request_id=f"drafts-{next(_ids)}",
        prompt=Prompt(text.prompt),
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        lifecycle=Lifecycle(received_s=0.0),
        targets=Targets(tenant=tenant),
    )
