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
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pdserve.protocol import StepCosts

RATIO_WEIGHT = 0.05  # of the newest step, once there were a few
MOST_OFF = 2.0  # by so much a single step may be off: a process may have stood still in it
SATURATED = 0.95  # of the best throughput: where more tokens in a step gain little
_CANDIDATES = 256  # token counts that are looked at for it

# Good until a node has measured itself: a small model on a small machine.
GUESS = StepCosts(knot_tokens=[1, 64], knot_s=[0.005, 0.016])


class StepRow(NamedTuple):
    """What one request has a step compute."""

    num_tokens: int
    num_before: int  # tokens whose KV is there already
    is_decoding: bool = False  # one token; else a chunk of a prompt
    is_sampled: bool = True  # whether it reaches the request's newest token


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that a step's time depends on."""

    num_tokens: int  # computed, over all rows
    num_sampled: int = 0  # rows that are sampled from
    prefill_pairs: int = 0  # queries x keys of chunks of prompts
    decode_context: int = 0  # tokens of context of decoding requests

    @classmethod
    def of(cls, rows: Iterable[StepRow]) -> StepShape:
        """Of a step that computes these."""
        tokens = sampled = pairs = context = 0
        for num_tokens, num_before, is_decoding, is_sampled in rows:
            tokens += num_tokens
            sampled += is_sampled
            if is_decoding:
                context += num_before + 1
            else:
                pairs += chunk_pairs(num_tokens, num_before)
        return cls(tokens, sampled, pairs, context)

    @property
    def is_decode(self) -> bool:
        """Whether there is no chunk of a prompt in it."""
        return self.prefill_pairs == 0


def chunk_pairs(num_tokens: int, num_before: int) -> int:
    """Query-key pairs of a causal chunk of `num_tokens` that follows `num_before` others."""
    return num_tokens * num_before + num_tokens * (num_tokens + 1) // 2


class PerfModel:
    """The costs of one node, and how far they are off at the moment.

    Policies ask several times a step, so what is asked is a few multiplications.
    """

    def __init__(
        self, costs: StepCosts = GUESS, prefill_ratio: float = 1.0, decode_ratio: float = 1.0
    ) -> None:
        self.prefill_ratio = prefill_ratio
        self.decode_ratio = decode_ratio
        self.prefill_error = 0.0  # moving average of |predicted / real - 1|
        self.decode_error = 0.0
        self._num_observed = [0, 0]  # steps with chunks of prompts, steps without
        self.costs = costs

    @property
    def costs(self) -> StepCosts:
        """As profiled."""
        return self._costs

    @costs.setter
    def costs(self, costs: StepCosts) -> None:
        """Predict from these; the ratios stay, and follow."""
        self._costs = costs
        self._knots = costs.knot_tokens
        self._lines = _lines(costs)
        self._sampled_s = costs.sampled_s
        self._pair_s = costs.pair_s
        self._context_s = costs.context_s

    @property
    def has_prefilled(self) -> bool:
        """Whether a step with a chunk of a prompt has been observed."""
        return self._num_observed[False] > 0

    @property
    def has_decoded(self) -> bool:
        """Whether a step without one has been observed."""
        return self._num_observed[True] > 0

    # ---- predictions, in seconds ---------------------------------------------------------------

    def step_s(self, shape: StepShape) -> float:
        """A step."""
        fixed_s, token_s = self._lines[bisect_left(self._knots, shape.num_tokens)]
        raw_s = (
            fixed_s
            + token_s * shape.num_tokens
            + self._sampled_s * shape.num_sampled
            + self._pair_s * shape.prefill_pairs
            + self._context_s * shape.decode_context
        )
        return raw_s * (self.prefill_ratio if shape.prefill_pairs else self.decode_ratio)

    def decode_s(self, num_requests: int, num_context_tokens: int) -> float:
        """A step that decodes so many requests of so much context together."""
        fixed_s, token_s = self._lines[bisect_left(self._knots, num_requests)]
        raw_s = (
            fixed_s
            + (token_s + self._sampled_s) * num_requests
            + self._context_s * num_context_tokens
        )
        return raw_s * self.decode_ratio

    def prefill_s(self, num_uncached: int, num_cached: int, token_budget: int) -> float:
        """A prompt alone, in chunks of `token_budget`; the pairs are the same in any chunks."""
        num_full, num_left = divmod(num_uncached, token_budget)
        raw_s = self._sampled_s + self._pair_s * chunk_pairs(num_uncached, num_cached)
        if num_full:
            raw_s += num_full * self._tokens_s(token_budget)
        if num_left:
            raw_s += self._tokens_s(num_left)
        return raw_s * self.prefill_ratio if num_uncached else 0.0

    def saturating_tokens(self, most: int) -> int:
        """DistServe's L_m: the fewest tokens of a prompt, up to `most`, that are computed with
        nearly the best throughput."""
        step = max(1, most // _CANDIDATES)
        rates = {
            tokens: tokens / self.prefill_s(tokens, 0, most) for tokens in range(most, 0, -step)
        }
        best = max(rates.values())
        return min(tokens for tokens, rate in rates.items() if rate >= SATURATED * best)

    # ---- correction ----------------------------------------------------------------------------

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step took so long.

        The first few count alike, later ones less and less than what was before them. One that is
        far off counts as if it were `MOST_OFF` times off: a machine that has become slow is
        followed, 5 % a step, and a pause is soon forgotten.
        """
        predicted_s = self.step_s(shape)
        if predicted_s <= 0 or seconds <= 0:
            return
        off = min(max(seconds / predicted_s, 1 / MOST_OFF), MOST_OFF)
        error = abs(1 / off - 1)
        self._num_observed[shape.is_decode] += 1
        weight = max(RATIO_WEIGHT, 1 / (1 + self._num_observed[shape.is_decode]))
        if shape.is_decode:
            self.decode_ratio *= 1 + weight * (off - 1)
            self.decode_error += weight * (error - self.decode_error)
        else:
            self.prefill_ratio *= 1 + weight * (off - 1)
            self.prefill_error += weight * (error - self.prefill_error)

    def _tokens_s(self, num_tokens: int) -> float:
        fixed_s, token_s = self._lines[bisect_left(self._knots, num_tokens)]
        return fixed_s + token_s * num_tokens


def _lines(costs: StepCosts) -> list[tuple[float, float]]:
    """(seconds at 0 tokens, seconds per token) up to each knot, and beyond the last one.

    Before the first knot its own value; beyond the last one as before it.
    """
    knots = list(zip(costs.knot_tokens, costs.knot_s, strict=True))
    lines = [(knots[0][1], 0.0)]
    for (x0, y0), (x1, y1) in pairwise(knots):
        slope = (y1 - y0) / (x1 - x0)
        lines.append((y0 - slope * x0, slope))
    return [*lines, lines[-1]]
