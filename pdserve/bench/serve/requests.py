"""The requests of each round of a load: the same for every server, new in every round."""

from __future__ import annotations

from pdserve.bench.load.workload import TimedRequest, poisson_times, random_ids
from pdserve.bench.serve.plan import Load, Plan

_ARRIVALS, _TOKENS, _WARM_UP = range(3)  # purposes of random numbers
_LEAST_CLOSED = 8  # least requests of a closed-loop round
_PER_STREAM = 4
_OPEN = 32


def requests_of(plan: Plan, load: Load, number: int) -> list[TimedRequest]:
    """Return the requests of round `number` of one of the plan's loads."""
    times = _times(plan, load, number)
    where = [plan.seed, _TOKENS, plan.loads.index(load), number]
    return [
        TimedRequest(
            at_s, "bench", random_ids(plan.prompt_tokens, [*where, index]), plan.output_tokens
        )
        for index, at_s in enumerate(times)
    ]


def warm_up_prompt(plan: Plan) -> list[int]:
    """Return a prompt of the measured length that is not one of the measured prompts."""
    return random_ids(plan.prompt_tokens, [plan.seed, _WARM_UP])


def _times(plan: Plan, load: Load, number: int) -> list[float]:
    """Return when each request is due; all at once for a closed loop, which sends them in turn."""
    if load.concurrency:
        return [0.0] * (plan.num_requests or max(_LEAST_CLOSED, _PER_STREAM * load.concurrency))
    return poisson_times(load.rate, plan.num_requests or _OPEN, [plan.seed, _ARRIVALS, number])
