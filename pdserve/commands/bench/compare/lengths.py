"""How long requests may be, if a comparison must end soon: on a slow machine, shorter.

Times of a request are about proportional to its lengths. So short ones tell how long they may be,
and these are measured in turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import ceil, floor, log2
from statistics import median
from typing import Final

from pdserve.commands.bench.compare.cases import CompareCase
from pdserve.commands.bench.compare.config import ComparePlan
from pdserve.commands.bench.compare.report import Unloaded

_FIRST: Final = 1 / 16  # factor on the lengths, which any machine can bear
_ANSWER: Final = 3.0  # tokens of the median answer at least, for a TPOT that means anything
_ROUNDS: Final = 9  # of all modes, that a scenario needs: the first four find its crossings
_MEASURING: Final = 0.6  # share of the time that is left for them
_TTFTS: Final = 2.0  # promised ones that a run must last: what a burst survives is no rate

Measure = Callable[[CompareCase], Awaitable[Unloaded]]


async def fitted(
    plan: ComparePlan,
    case: CompareCase,
    num_cases: int,
    measure: Measure,
) -> tuple[CompareCase, Unloaded]:
    """Return the longest requests for which there is time, and what was measured of them.

    Args:
        plan: what has to be done in which time.
        case: the whole lengths.
        num_cases: that share the time.
        measure: sends a case to an idle cluster.
    """
    if case.times is None:
        return case, await measure(case)
    whole = median(request.num_output for request in case.sample(plan.least_requests))
    shortest = min(1.0, 2.0 ** ceil(log2(_ANSWER / whole)))
    factor, was_too_long = max(_FIRST, shortest), False
    while True:
        shortened = case.times(factor)
        idle = await measure(shortened)
        longer = -log2(_times(plan, shortened, idle, num_cases))
        wanted = min(1.0, max(shortest, factor * 2.0 ** floor(longer)))
        if wanted == factor or (wanted > factor and was_too_long):
            return shortened, idle
        factor, was_too_long = wanted, wanted < factor


def _times(plan: ComparePlan, case: CompareCase, idle: Unloaded, num_cases: int) -> float:
    """Return how many times as long as they may be these requests take."""
    drains_s = idle.burst_requests / idle.burst_per_s / 2
    run_s = plan.least_requests / idle.burst_per_s + drains_s
    num_runs = _ROUNDS * (len(plan.modes) + 1)
    may_take_s = max(plan.duration_s, _MEASURING * plan.budget_s / num_cases / num_runs)
    promised_s = (plan.ttft_scale or case.ttft_scale) * idle.slowest_ttft_s
    return max(run_s / may_take_s, _TTFTS * promised_s / plan.duration_s)
