"""Engine steps against the best that the machine can do: `pdserve bench step`.

Every step is measured in turns with the others and with two yardsticks, a plain streaming read and
a large matrix product, so that a slow phase of the machine affects all of them. A floor is that of
floor.py with the best rate seen anywhere in the run: by a yardstick, or by a step itself if its
work took less time than the yardstick predicts. So a slow yardstick does not flatter any ratio, and
no ratio is below 1, except for steps whose memory the caches hold.

`floor_ratio` is the median step over that floor. `beside_ratio` compares each step with the
yardsticks of the same moment, and is the better figure while other work runs on the machine.
If busy neighbours are given, each case is also measured beside them (neighbours.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from pdserve.commands.bench.step.cases import Phase, SkippedCase, StepCase
from pdserve.commands.bench.step.floor import Limit, Rates, StepWork, Work
from pdserve.commands.bench.step.neighbours import BesideNeighbours, OtherWork, Rounds
from pdserve.measured.perf_model import StepRow

LEAST_ROUNDS = 3
YARDSTICK = "yardstick"
_CASE_S = 0.2  # time of a case per round: short steps are repeated
_MOST_REPEATS = 20
_IN_CACHE = 4  # less memory than this many times the largest cache may come from the cache


class StepTime(NamedTuple):
    """The time of one step."""

    total_s: float  # the whole runner: batch, model, sampling
    model_s: float  # the model alone


class Threads(NamedTuple):
    """What computes a step."""

    num_threads: int
    num_cores: int  # that they may use


class StepRunner(Protocol):
    """The model runner and the yardsticks that are measured."""

    def step(self, rows: Sequence[StepRow]) -> StepTime:
        """Compute one step."""
        ...

    def read_rate(self) -> float:
        """Measure a streaming read now, in bytes per second."""
        ...

    def product_rate(self) -> float:
        """Measure a large matrix product now, in FLOPs per second."""
        ...


class StepBenchRow(msgspec.Struct, frozen=True):
    """The result of one case. Times in milliseconds."""

    model: str
    weights: str  # type of the weights
    phase: Phase
    batch: int
    context: int
    steps: int  # measured steps
    p50_ms: float
    min_ms: float
    floor_ms: float
    limit: Limit
    floor_ratio: float  # p50 / floor
    beside_ratio: float  # median of step / floor by the yardsticks of the same moment
    overhead_ms: float  # median of what the runner does outside the model
    tokens_per_s: float  # computed tokens; sampled ones for a decode
    neighbours: BesideNeighbours | None  # if there were any


class MachineRates(msgspec.Struct, frozen=True):
    """The best rates of the machine, and what reached them."""

    read_gb_per_s: float
    read_seen_in: str
    product_gflop_per_s: float
    product_seen_in: str
    yardstick_read_gb_per_s: float  # median of the yardstick's rates
    yardstick_product_gflop_per_s: float
    threads: int  # 0: on a GPU
    processor: str  # or the GPU, or how many of them
    kernels: str  # or the attention, and whether there are graphs
    load_average: float  # at the beginning


class StepBenchReport(msgspec.Struct, frozen=True):
    """The results of `pdserve bench step`."""

    rows: list[StepBenchRow]
    skipped: list[SkippedCase]
    machine: MachineRates


@dataclass(frozen=True, slots=True)
class Observed:
    """The steps of a case, and the yardsticks measured just before each."""

    case: StepCase
    work: Work
    times: list[StepTime] = field(default_factory=list)
    beside: list[Rates] = field(default_factory=list)
    rounds: Rounds = field(default_factory=Rounds)

    @property
    def least_s(self) -> float:
        """Time of its fastest step."""
        return min(time.total_s for time in self.times)


@dataclass(frozen=True, slots=True)
class BestRates:
    """A rate, and what reached it."""

    rate: float
    seen_in: str


def observe(
    cases: Sequence[StepCase],
    work: StepWork,
    bench: StepRunner,
    budget_s: float,
    now: Callable[[], float] = time.perf_counter,
    neighbours: OtherWork | None = None,
) -> list[Observed]:
    """Measure all cases in turns, for `budget_s` but at least LEAST_ROUNDS rounds.

    Before the first round each case is computed once, which does not count.
    """
    observed = [Observed(case, work.of(case.rows)) for case in cases]
    repeats = [_repeats(bench.step(case.rows)) for case in cases]
    end_s, num_rounds, round_s = now() + budget_s, 0, 0.0
    while num_rounds < LEAST_ROUNDS or now() + round_s <= end_s:
        started_s = now()
        for seen, count in zip(observed, repeats, strict=True):
            seen.beside.extend([Rates(bench.read_rate(), bench.product_rate())] * count)
            times = [bench.step(seen.case.rows) for _ in range(count)]
            seen.times.extend(times)
            if neighbours is not None:
                seen.rounds.alone_s.append(statistics.fmean(time.total_s for time in times))
                steps = partial(_mean_step_s, bench, seen.case, count)
                seen.rounds.measure(neighbours, steps, now)
        num_rounds, round_s = num_rounds + 1, now() - started_s
    return observed


def best_read(observed: Sequence[Observed], cache_bytes: int) -> BestRates:
    """Return the best read rate, in bytes per second.

    Steps whose memory the caches may hold are ignored, since they do not show the memory's rate.
    """
    rates = [BestRates(rates.bytes_per_s, YARDSTICK) for seen in observed for rates in seen.beside]
    rates += [
        BestRates(seen.work.num_bytes / seen.least_s, _name(seen.case))
        for seen in observed
        if seen.work.num_bytes >= _IN_CACHE * cache_bytes
    ]
    return max(rates, key=lambda best: best.rate)


def best_product(observed: Sequence[Observed]) -> BestRates:
    """Return the best rate of arithmetic, in FLOPs per second."""
    rates = [BestRates(rates.flops_per_s, YARDSTICK) for seen in observed for rates in seen.beside]
    rates += [BestRates(seen.work.num_flops / seen.least_s, _name(seen.case)) for seen in observed]
    return max(rates, key=lambda best: best.rate)


class Computing(NamedTuple):
    """What computes the steps: as MachineRates."""

    processor: str
    num_threads: int
    kernels: str


def machine_rates(
    observed: Sequence[Observed],
    read: BestRates,
    product: BestRates,
    product_shape: tuple[int, int, int],
    computing: Computing,
    load_average: float,
) -> MachineRates:
    """Make the machine's part of the report; `read` and `product`: the best of the run."""
    beside = [rates for seen in observed for rates in seen.beside]
    yardstick = "torch linear {}x{}x{}".format(*product_shape)
    return MachineRates(
        read_gb_per_s=read.rate / 1e9,
        read_seen_in=read.seen_in,
        product_gflop_per_s=product.rate / 1e9,
        product_seen_in=yardstick if product.seen_in == YARDSTICK else product.seen_in,
        yardstick_read_gb_per_s=statistics.median(r.bytes_per_s for r in beside) / 1e9,
        yardstick_product_gflop_per_s=statistics.median(r.flops_per_s for r in beside) / 1e9,
        threads=computing.num_threads,
        processor=computing.processor,
        kernels=computing.kernels,
        load_average=load_average,
    )


def bench_row(
    model: str, weights: str, seen: Observed, rates: Rates, threads: Threads
) -> StepBenchRow:
    """Make the row of one case; `rates`: the best of the run."""
    totals = [time.total_s for time in seen.times]
    median_s, floor_s = statistics.median(totals), rates.floor_s(seen.work)
    ratios = [
        total / beside.floor_s(seen.work) for total, beside in zip(totals, seen.beside, strict=True)
    ]
    return StepBenchRow(
        model=model,
        weights=weights,
        phase=seen.case.phase,
        batch=seen.case.batch,
        context=seen.case.context,
        steps=len(totals),
        p50_ms=median_s * 1e3,
        min_ms=min(totals) * 1e3,
        floor_ms=floor_s * 1e3,
        limit=rates.limit(seen.work),
        floor_ratio=median_s / floor_s,
        beside_ratio=statistics.median(ratios),
        overhead_ms=statistics.median(time.total_s - time.model_s for time in seen.times) * 1e3,
        tokens_per_s=seen.case.num_tokens / median_s,
        neighbours=seen.rounds.result(*threads) if seen.rounds.beside_s else None,
    )


def _mean_step_s(bench: StepRunner, case: StepCase, count: int) -> float:
    return statistics.fmean(bench.step(case.rows).total_s for _ in range(count))


def _repeats(first: StepTime) -> int:
    """Return how often a case is computed in a round, from its first time."""
    return max(1, min(_MOST_REPEATS, int(_CASE_S / max(first.total_s, 1e-6))))


def _name(case: StepCase) -> str:
    return f"{case.phase} {case.batch}x{case.context}"
