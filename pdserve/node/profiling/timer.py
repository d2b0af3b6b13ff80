"""Runs synthetic steps with a node's real runner, over its own pool, and measures their times."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np

from pdserve.engine.interface import Launcher, Runner
from pdserve.engine.request import Request, Scheduled
from pdserve.kv import need
from pdserve.lifecycle import Lifecycle
from pdserve.measured.perf_model import StepRow, StepShape
from pdserve.node.profiling.fit import Sample
from pdserve.node.profiling.steps import ALWAYS, Step, work
from pdserve.protocol import Prompt, SamplingParams

LEAST_S = 1e-6  # of a step: the kernel's clock and ours might differ by more than the step
MOST_ROUNDS = 5  # measurements per step
MOST_USUAL = 1.1  # ratio of a step's usual time to its least: what is above is the moment's noise
FIRST_ROUND = 0.5  # share of the time that the warm-up round may take
_GREEDY = SamplingParams(temperature=0.0)
_SCHEDSTAT = "/proc/thread-self/schedstat"  # ns running, ns waiting for a core, time slices


@contextmanager
def core_waits() -> Iterator[Callable[[], float]]:
    """Yields how long the calling thread has been runnable without a core so far: a function, in s.

    A call takes a microsecond, because the file is kept open. On kernels without this count the
    function returns 0.
    """
    try:
        file = os.open(_SCHEDSTAT, os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9
    finally:
        os.close(file)


class Timed(NamedTuple):
    """A step that was measured."""

    seconds: float
    model_s: float  # of these, in the model itself, as Runner.model_s


class StepTimer:
    """Measures steps. It overwrites blocks of the pool, so use it while the pool is empty.

    A measurement covers everything that a step does between two others of its kind: sampling, and
    the part of laying out the batch that cannot overlap with the step before. It does not include
    the event loop, nor waiting for a core that other processes use; the ratio that the node learns
    while it serves covers both. So a profile, which is cached, does not depend on whether a
    neighbour was busy when it was made.

    A device goes from one step of decodes to the next without the host (`Runner.launcher`). So such
    a step is measured there as it is served: launched behind another one, from whose end on it
    counts.
    """

    def __init__(
        self,
        runner: Runner,
        block_size: int,
        vocab_size: int,
        now: Callable[[], float] = time.perf_counter,
        waits: Callable[[], AbstractContextManager[Callable[[], float]]] = core_waits,
        before_each: Callable[[], None] = lambda: None,
    ) -> None:
        """Measure steps of this runner, whose pool must be large enough for them.

        Args:
            runner: an idle runner.
            block_size: of its pool.
            vocab_size: of its model. Tokens are any of these, since equal ones would all choose the
                same experts, which are then read only once.
            now: the clock, in seconds.
            waits: seconds for which the calling thread was waiting for a core.
            before_each: called before each step; it may raise, to stop the profiling.
        """
        self._runner = runner
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._now = now
        self._waits = waits
        self._before_each = before_each

    def seconds(self, step: Step) -> float:
        """Run a step; its time."""
        return self.timed(step).seconds

    def timed(self, step: Step) -> Timed:
        """Run a step; its times."""
        self._before_each()
        rows = self._rows(step)
        if not StepShape.of(step).is_decode:
            return self._time(lambda: self._runner.prepare(rows)())
        launcher = self._runner.launcher
        result = None if launcher is None else self._launched_behind(rows, launcher)
        if result is not None:
            return self._time(result)
        self._foresee(rows)
        return self._time(lambda: self._runner.prepare(rows)())

    def _time(self, run: Callable[[], object]) -> Timed:
        with self._waits() as waited_s:
            model_before_s = self._runner.model_s
            started_s = self._now()
            before_s = waited_s()  # after the start, so that no earlier wait is subtracted
            run()
            away_s = waited_s() - before_s
            seconds = max(self._now() - started_s - away_s, LEAST_S)
            # What a device computes is counted from the end of the step before, which is a little
            # before the clock was started.
            return Timed(seconds, min(self._runner.model_s - model_before_s, seconds))

    def sample(self, steps: Sequence[Step], budget_s: float) -> list[Sample]:
        """Measure as many steps, as often, as there is time for; the first ones (`ALWAYS`) always.

        Each step is run once to warm up, since a kernel may have to be built for its size. Then all
        are measured in rounds, each in another order (with decodes following decodes, as in
        service), so that a disturbance does not hit one step only. Minima compare the steps best;
        how much longer they usually take is one factor for all, limited to `MOST_USUAL`.
        """
        started_s = self._now()
        warm = self._warm(steps, started_s + FIRST_ROUND * budget_s)
        end_s = started_s + budget_s
        times: list[list[float]] = [[] for _ in warm]
        order, shuffle = list(range(len(warm))), random.Random(0).shuffle
        for _ in range(MOST_ROUNDS):
            shuffle(order)
            for index in sorted(order, key=lambda index: StepShape.of(steps[index]).is_decode):
                if self._now() + warm[index] <= end_s:
                    times[index].append(self.seconds(steps[index]))
        measured = [some or [first] for some, first in zip(times, warm, strict=True)]
        usual = statistics.median(statistics.median(some) / min(some) for some in measured)
        usual = min(usual, MOST_USUAL)
        return [
            (StepShape.of(step), usual * min(some))
            for step, some in zip(steps, measured, strict=False)
        ]

    def _warm(self, steps: Sequence[Step], end_s: float) -> list[float]:
        """Time of each step's first run; stops before one that would probably end after `end_s`."""
        warm: list[float] = []
        for step in steps:
            if len(warm) >= ALWAYS:
                expected_s = warm[-1] * work(step) / work(steps[len(warm) - 1])
                if self._now() + max(warm[0], expected_s) > end_s:
                    break
            warm.append(self.seconds(step))
        return warm

    def _rows(self, step: Step) -> list[Scheduled]:
        rows: list[Scheduled] = []
        rng = np.random.default_rng(0)
        first_block = 0
        for number, row in enumerate(step):
            num_blocks = need.blocks_for(row.num_before + row.num_tokens, self._block_size)
            blocks = list(range(first_block, first_block + num_blocks))
            num_tokens = row.num_before + row.num_tokens + (not row.is_sampled)
            tokens: list[int] = rng.integers(self._vocab_size, size=num_tokens).tolist()
            request = _request(f"profile-{number}", row, tokens, blocks)
            rows.append(Scheduled(request, row.num_tokens))
            first_block += num_blocks
        return rows

    def _foresee(self, rows: Sequence[Scheduled]) -> None:
        """Lay out the rows as in service: in advance, while the step before is running."""
        newest = _step_back(rows)
        self._runner.prepare(rows)  # without running it
        self._runner.foresee(rows)
        _step_on(rows, newest)

    def _launched_behind(
        self, rows: Sequence[Scheduled], launcher: Launcher
    ) -> Callable[[], object] | None:
        """Launch the step before and this one; when the first has ended, return how this one does.

        None: such a step cannot be launched behind another one.
        """
        newest = _step_back(rows)
        before = launcher.prepare(rows)
        before.launch()
        self._runner.foresee(rows)
        if not before.can_be_followed:
            before.result()
            _step_on(rows, newest)
            return None
        _step_on(rows, range(-1, -1 - len(rows), -1))  # the device knows these tokens
        step = before.prepare_next(rows)
        step.launch()
        before.result()
        return step.result


def _step_back(rows: Sequence[Scheduled]) -> list[int]:
    """Have decodes as they are one token earlier; return that token of each."""
    for row in rows:
        row.request.num_computed_tokens -= 1
    return [row.request.output_token_ids.pop() for row in rows]


def _step_on(rows: Sequence[Scheduled], tokens: Sequence[int]) -> None:
    for row, token in zip(rows, tokens, strict=True):
        row.request.output_token_ids.append(token)
        row.request.num_computed_tokens += 1


def _request(request_id: str, row: StepRow, tokens: list[int], blocks: list[int]) -> Request:
    num_prompt = len(tokens) - int(row.is_decoding)
    return Request(
        request_id=request_id,
        prompt=Prompt(tokens[:num_prompt]),
        sampling=_GREEDY,
        lifecycle=Lifecycle(received_s=0.0),
        output_token_ids=tokens[num_prompt:],
        num_computed_tokens=row.num_before,
        block_table=blocks,
    )
