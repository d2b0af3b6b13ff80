"""A model whose next token is a function of its history, and who hears of its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from decode_node.policies import DecodePolicy, make_decode_policy
from pdserve.engine.interface import StepReport
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.scheduler import Policy
from pdserve.measured.perf_model import PerfModel
from pdserve.settings.config import DecodePolicyName, EngineConfig, PolicyConfig, PrefillPolicyName
from pdserve.shared.clock import Clock, ManualClock
from pdserve.shared.errors import PdserveError
from prefill_node.policies import make_prefill_policy


def next_token(token_ids: Sequence[int]) -> int:
    """What the fake model says after these tokens."""
    return (sum(token_ids) * 31 + len(token_ids)) % 1000 + 10


class PlainRunner:
    """A runner (`pdserve.engine.interface.Runner`) that prepares nothing: all is in `execute`."""

    model_s = 0.0
    launcher: Any = None

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], list[SampledToken | None]]:
        return partial(self.execute, rows, progress)

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """Nothing."""

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        raise NotImplementedError


class QuietObserver:
    """A StepObserver that does nothing; a request that fails, or is recalled, fails the test."""

    def step_planned(self, rows: Sequence[Scheduled]) -> Sequence[int]:
        return ()

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        raise AssertionError("nobody has asked for it")

    def step_done(self, report: StepReport) -> None:
        """Nothing."""

    def requests_failed(self, requests: list[Request], error: PdserveError) -> None:
        raise error

    def recall(self, request: Request) -> None:
        raise AssertionError(f"{request.request_id} has KV nowhere else")


@dataclass
class Observer(QuietObserver):
    """Collects what the engine reports."""

    done: dict[str, Request] = field(default_factory=dict)
    failed: list[tuple[Request, PdserveError]] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    layer_ends: Sequence[int] = ()
    heard: list[tuple[str, int]] = field(default_factory=list)  # in which order

    def step_planned(self, rows: Sequence[Scheduled]) -> Sequence[int]:
        self.heard.append(("planned", len(rows)))
        return self.layer_ends

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        self.heard.append(("layers", num_layers))

    def step_done(self, report: StepReport) -> None:
        self.heard.append(("done", len(report.rows)))
        self.reports.append(report)
        for row in report.rows:
            if row.request.is_done:
                self.done[row.request.request_id] = row.request
        self.changed.set()

    def requests_failed(self, requests: list[Request], error: PdserveError) -> None:
        self.failed += [(request, error) for request in requests]
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class FakeRunner(PlainRunner):
    """Checks that every row has its blocks, and that nothing is computed twice or skipped."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.steps: list[list[tuple[str, int]]] = []
        self.error: Exception | None = None

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        self.steps.append([(row.request.request_id, row.num_tokens) for row in rows])
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        sampled: list[SampledToken | None] = []
        written: set[int] = set()
        for row in rows:
            request = row.request
            end = request.num_computed_tokens + row.num_tokens
            assert 0 < row.num_tokens <= request.num_uncomputed_tokens
            assert len(request.block_table) * self.block_size >= end
            first = request.num_computed_tokens // self.block_size
            blocks = set(request.block_table[first : -(-end // self.block_size)])
            assert not blocks & written, "two requests write to one block in a step"
            written |= blocks
            history = request.token_slice(0, request.num_tokens)
            sampled.append(SampledToken(next_token(history)) if row.samples else None)
        if progress is not None:
            for num_layers in progress.ends:
                progress.done(num_layers)
        return sampled


def prefill_policy(
    token_budget: int,
    max_batch_size: int,
    name: PrefillPolicyName = "fcfs-budget",
    perf: PerfModel | None = None,
    clock: Clock | None = None,
    prefill_chunk: int = 0,
    **limits: Any,
) -> Policy:
    """A prefill policy by its name, with steps of this size."""
    return make_prefill_policy(
        PolicyConfig(prefill_policy=name, prefill_chunk=prefill_chunk),
        EngineConfig(token_budget=token_budget, max_batch_size=max_batch_size),
        perf or PerfModel(),
        clock or ManualClock(),
        **limits,
    )


def decode_policy(
    token_budget: int,
    max_batch_size: int,
    name: DecodePolicyName = "max-batch",
    perf: PerfModel | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> DecodePolicy:
    """A decode policy by its name, with steps of this size."""
    return make_decode_policy(
        PolicyConfig(decode_policy=name, **settings),
        EngineConfig(token_budget=token_budget, max_batch_size=max_batch_size),
        perf or PerfModel(),
        clock or ManualClock(),
    )


def expected_output(request: Request) -> list[int]:
    """What a request's whole output must be, whatever happens to it on the way."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[request.num_prompt_tokens :]
