"""What a step of an engine will take: one model for policies, router, admission and simulation.

A step's linear layers see only how many tokens there are, be they chunks of prompts or decode
tokens; that part is piecewise linear, because small counts are bound by bandwidth and large ones by
arithmetic. Attention adds a term for each query and key of a chunk, and one for each token of
context that a decoding request reads; sampling one for each row that is sampled. Prefill, decode
and mixed steps are thus one formula (after DistServe's appendix A and Vidur's piecewise fits).

What the machine does differently from its profile is followed by the ratio of real to predicted
times, one for steps with chunks of prompts and one for those without.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.protocol import StepCosts

RATIO_WEIGHT = 0.05  # of the newest step
SATURATED = 0.95  # of the best throughput: where more tokens in a step gain little

# Good until a node has measured itself: a small model on a small machine.
GUESS = StepCosts(knot_tokens=[1, 64], knot_s=[0.005, 0.016])


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that a step's time depends on."""

    num_tokens: int  # computed, over all rows
    num_sampled: int = 0  # rows that are sampled from
    prefill_pairs: int = 0  # queries x keys of chunks of prompts
    decode_context: int = 0  # tokens of context of decoding requests

    @property
    def is_decode(self) -> bool:
        """Whether there is no chunk of a prompt in it."""
        return self.prefill_pairs == 0


def chunk_pairs(num_tokens: int, num_before: int) -> int:
    """Query-key pairs of a causal chunk of `num_tokens` that follows `num_before` others."""
    return num_tokens * num_before + num_tokens * (num_tokens + 1) // 2


class PerfModel:
    """The costs of one node, and how far they are off at the moment."""

    def __init__(
        self, costs: StepCosts = GUESS, prefill_ratio: float = 1.0, decode_ratio: float = 1.0
    ) -> None:
        self.costs = costs
        self.prefill_ratio = prefill_ratio
        self.decode_ratio = decode_ratio

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step."""
        costs = self.costs
        raw = (
            interpolate(costs.knot_tokens, costs.knot_s, shape.num_tokens)
            + costs.sampled_s * shape.num_sampled
            + costs.pair_s * shape.prefill_pairs
            + costs.context_s * shape.decode_context
        )
        return raw * (self.decode_ratio if shape.is_decode else self.prefill_ratio)

    def decode_s(self, num_requests: int, num_context_tokens: int) -> float:
        """Seconds of a step that decodes so many requests of so much context together."""
        return self.step_s(StepShape(num_requests, num_requests, decode_context=num_context_tokens))

    def prefill_s(self, num_uncached: int, num_cached: int, token_budget: int) -> float:
        """Seconds to prefill a prompt alone, in chunks of `token_budget`."""
        seconds, done, end = 0.0, num_cached, num_cached + num_uncached
        while done < end:
            chunk = min(token_budget, end - done)
            pairs = chunk_pairs(chunk, done)
            done += chunk
            seconds += self.step_s(StepShape(chunk, int(done == end), prefill_pairs=pairs))
        return seconds

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step took so long."""
        predicted = self.step_s(shape)
        if predicted <= 0:
            return
        if shape.is_decode:
            self.decode_ratio *= 1 + RATIO_WEIGHT * (seconds / predicted - 1)
        else:
            self.prefill_ratio *= 1 + RATIO_WEIGHT * (seconds / predicted - 1)

    def saturating_tokens(self, most: int) -> int:
        """DistServe's L_m: the fewest tokens of a step, up to `most`, that get nearly the best
        throughput."""
        candidates = sorted({k for k in self.costs.knot_tokens if k < most} | {most})
        rates = [
            tokens / self.step_s(StepShape(tokens, 1, chunk_pairs(tokens, 0)))
            for tokens in candidates
        ]
        best = max(rates)
        return next(
            t for t, rate in zip(candidates, rates, strict=True) if rate >= SATURATED * best
        )


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear through (xs, ys); beyond the last point on its last slope, before the first
    one its value."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    i = min(bisect_left(xs, x), len(xs) - 1)
    x0, x1, y0, y1 = xs[i - 1], xs[i], ys[i - 1], ys[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
