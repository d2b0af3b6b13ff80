"""Measures how much longer decode steps take on fewer cores: for nodes that split theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from statistics import fmean
from typing import Final

from pdserve import _native
from pdserve.engine.interface import Runner
from pdserve.measured.perf_model import StepShape
from pdserve.node.profiling.steps import Step, StepLimits, steps_to_profile
from pdserve.node.profiling.timer import StepTimer
from pdserve.rules.cores import Slowdowns

log = logging.getLogger(__name__)

ROUNDS: Final = 3  # measurements per step and number of cores, of which the least counts


def measure_slowdowns(
    limits: StepLimits,
    runner: Runner,
    num_cores: int,
    before_each: Callable[[], None] = lambda: None,
) -> Slowdowns:
    """Run a small and a middling decode step with fewer and fewer threads, up to `num_cores`.

    Overwrites blocks of the pool. `before_each` is called before each step, and may raise.
    """
    decodes = [step for step in steps_to_profile(limits) if StepShape.of(step).is_decode]
    steps = [decodes[0], decodes[len(decodes) // 2]]
    timer = StepTimer(runner, limits.block_size, limits.vocab_size, before_each=before_each)
    ladder = core_ladder(num_cores)
    times: dict[int, list[float]] = {}
    before = _native.num_threads()
    try:
        for cores in ladder:
            _native.set_num_threads(cores)
            times[cores] = [_least_s(timer, step) for step in steps]
    finally:
        _native.set_num_threads(before)
    found = slowdowns_of(times)
    log.info(
        "decode steps on fewer cores: %s",
        ", ".join(f"{k}: x{f:.2f}" for k, f in zip(found.cores, found.factors, strict=True)),
    )
    return found


def core_ladder(num_cores: int) -> list[int]:
    """Return the numbers of cores to measure: powers of two, all but one, and all."""
    powers = {1 << power for power in range(num_cores.bit_length())}
    return sorted({cores for cores in powers if cores < num_cores} | {num_cores - 1, num_cores})


def slowdowns_of(times_s: dict[int, list[float]]) -> Slowdowns:
    """Return the factors: by number of cores, the times of the same steps.

    A step is never faster on fewer cores; where it was, that was noise.
    """
    cores = sorted(times_s)
    all_s = times_s[cores[-1]]
    factors = [1.0]
    for number in reversed(cores[:-1]):
        ratios = [some / all_ for some, all_ in zip(times_s[number], all_s, strict=True)]
        factors.append(max(factors[-1], fmean(ratios)))
    return Slowdowns(cores, factors[::-1])


def _least_s(timer: StepTimer, step: Step) -> float:
    timer.seconds(step)  # a kernel may have to be built for its size, and threads to be started
    return min(timer.seconds(step) for _ in range(ROUNDS))
