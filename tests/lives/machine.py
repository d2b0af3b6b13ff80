"""What computes a node's steps: a runner over fake KV, and a thread that takes virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from kv_transfer.memory import ExportedPool
from pdserve.engine.interface import shape_of
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.engine.steps.thread import Computation
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import StepCosts
from tests.lives.kv import NUM_LAYERS, POISON, KvNumbers, sampled
from tests.lives.loop import PROCESS

T = TypeVar("T")

COSTS = StepCosts(
    knot_tokens=[1, 64], knot_s=[0.02, 0.06], pair_s=1e-7, context_s=1e-6, sampled_s=1e-5
)
TURN_S = 1e-5  # until the thread turns to a step


@dataclass
class Machine:
    """What a node runs on."""

    random: Random
    kill: Callable[[str], None]  # ends the process at once
    slowness: float = 1.0
    num_bad_steps: int = 0  # of the next steps raise
    hangs: bool = False  # the next step never ends
    is_dead: bool = False  # the thread has ended
    step_s: float = 0.001  # of the step that was prepared last
    is_device: bool = False  # steps run ahead of the loop, as on a GPU
    adapters: set[str] = field(default_factory=set)  # digests of those in memory
    num_lacking: int = 0  # rows of steps whose adapter was not in memory
    perf: PerfModel = field(default_factory=lambda: PerfModel(COSTS))


def machine_here() -> Machine:
    """The machine of the process that runs."""
    process: Any = PROCESS.get()
    return process.machine


class LifeWatchdog:
    """As `pdserve._native.Watchdog`, of a thread that stands still in steps that never end."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._since_s: float | None = None
        self._is_started = False

    def start(self, *_: float) -> None:
        """From now on it looks when it is asked."""
        self._is_started = True

    def stop(self) -> None:
        """Nothing here ends a process but its event loop."""

    def stands(self) -> None:
        """From now on."""
        self._since_s = self._now_s()

    @property
    def still_s(self) -> float:
        if self._since_s is None or not self._is_started:
            return 0.0
        return self._now_s() - self._since_s


class LifeThread:
    """As `pdserve.engine.steps.thread.StepThread`, in virtual time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._machine = machine_here()
        self.watchdog = LifeWatchdog(self._loop.time)

    def submit(self, compute: Callable[[], T]) -> Computation[T]:
        """Compute at some time during the step: KV is read and written then."""
        loop, machine = self._loop, self._machine
        work = Computation(compute, loop.create_future(), loop.create_future())
        loop.call_later(TURN_S, _settle, work.begun, None)
        if machine.hangs or machine.is_dead:
            self.watchdog.stands()
            return work
        share = machine.random.choice([0.0, 0.5, 1.0])
        loop.call_later(TURN_S + share * machine.step_s, self._compute, work, 1 - share)
        return work

    @property
    def is_alive(self) -> bool:
        return not self._machine.is_dead

    def close(self) -> None:
        """There is no thread to end."""

    def _compute(self, work: Computation[Any], share_left: float) -> None:
        left_s = share_left * self._machine.step_s
        try:
            result = work.compute()
        except Exception as error:  # noqa: BLE001  what a step raises is its result
            self._loop.call_later(left_s, _fail, work.result, error)
        else:
            self._loop.call_later(left_s, _settle, work.result, result)


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row as it was when its step was prepared."""

    request: Request
    table: Any
    tokens: list[int]
    begin: int
    end: int
    num_output: int
    num_drafts: int
    samples: bool


@dataclass(eq=False)
class LifeStep:
    """A step (`pdserve.engine.interface.LaunchedStep`); devices compute it as late as they may."""

    runner: LifeRunner
    rows: list[_Row]
    progress: LayerProgress | None
    before: LifeStep | None = None
    sampled: list[SampledToken | None] | None = None

    @property
    def can_be_followed(self) -> bool:
        """As of a model's: how many tokens a row with drafts gets is known at its end only."""
        return not any(row.num_drafts for row in self.rows)

    def __call__(self) -> list[SampledToken | None]:
        self.launch()
        return self.result()

    def launch(self) -> None:
        self.runner.launched.append(self)

    def result(self) -> list[SampledToken | None]:
        while self.sampled is None:
            self.runner.launched.popleft().compute()
        return self.sampled

    def prepare_next(self, rows: Sequence[Scheduled]) -> LifeStep:
        step = self.runner.prepare(rows)
        step.before = self
        return step

    def compute(self) -> None:
        for row in self.rows:
            if row.tokens[-1] < 0:
                assert self.before is not None, "it runs ahead of no step"
                assert self.before.sampled is not None, "that one was launched before"
                token = self.before.sampled[-1 - row.tokens[-1]]
                assert token is not None, "it had decodes only"
                row.tokens[-1] = token.token_id
        self.sampled = self.runner.compute(self.rows, self.progress)


class LifeRunner:
    """Computes steps over a pool (`pdserve.engine.interface.Runner`)."""

    def __init__(self, pool: ExportedPool, machine: Machine) -> None:
        self.model_s = 0.0
        self.launched: deque[LifeStep] = deque()  # and not computed
        self.launcher = self if machine.is_device else None
        self._numbers = KvNumbers(pool)
        self._machine = machine

    def prepare(self, rows: Sequence[Scheduled], progress: LayerProgress | None = None) -> LifeStep:
        """As Runner.prepare: what a step reads is laid out before it runs."""
        machine = self._machine
        noise = machine.random.uniform(0.8, 1.3)
        machine.step_s = machine.perf.step_s(shape_of(rows)) * machine.slowness * noise
        self.model_s += machine.step_s
        return LifeStep(self, [_laid_out(row) for row in rows], progress)

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """Nothing is laid out ahead."""

    def compute(
        self, rows: list[_Row], progress: LayerProgress | None
    ) -> list[SampledToken | None]:
        """Compute a step, at last."""
        machine, numbers = self._machine, self._numbers
        if any(POISON in row.tokens[: row.end] for row in rows):
            machine.kill("poison")
            return []
        if machine.num_bad_steps:
            machine.num_bad_steps -= 1
            raise RuntimeError("a bad step")
        prompts = [row.request.prompt for row in rows]
        machine.num_lacking += len({each.adapter for each in prompts} - {"", *machine.adapters})
        kv = [
            numbers.compute(
                row.table, row.tokens, row.begin, row.end, own.adapter, own.adapted_from
            )
            for row, own in zip(rows, prompts, strict=True)
        ]
        for layer in range(NUM_LAYERS):
            for row, chains in zip(rows, kv, strict=True):
                numbers.write(row.table, row.begin, chains, layer)
            if progress is not None and layer + 1 in progress.ends:
                progress.done(layer + 1)
        return [self._sampled(row) if row.samples else None for row in rows]

    def _sampled(self, row: _Row) -> SampledToken:
        request, last = row.request, row.end - row.num_drafts
        kv = self._numbers.read(row.table, last)
        token = sampled(kv, request.sampling, row.num_output)
        others = tuple(sampled(kv, s.sampling, 0) for s in request.siblings)
        after = tuple(
            sampled(
                self._numbers.read(row.table, last + ahead),
                request.sampling,
                row.num_output + ahead,
            )
            for ahead in range(1, row.num_drafts + 1)
        )
        return replace(token, siblings=others, after=after) if others or after else token


def _laid_out(row: Scheduled) -> _Row:
    request = row.request
    begin = request.num_computed_tokens
    end = begin + row.num_tokens
    table = np.array(request.block_table, np.int64)
    return _Row(
        request,
        table,
        [*request.token_slice(0, end), *request.draft],
        begin,
        end,
        len(request.output_token_ids),
        len(request.draft),
        row.samples,
    )
