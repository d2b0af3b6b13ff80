"""Predicts the time of engine steps: one model for policies, router, admission and simulation.

The time of the linear layers depends only on the number of tokens, whether of prompt chunks or of
decode. It is piecewise linear, because small counts are bound by memory bandwidth and large ones by
arithmetic. Attention adds a term per query-key pair of a chunk, and a term per context token of a
decoding request; sampling adds a term per sampled row. Prefill, decode and mixed steps thus share
one formula (after DistServe's appendix A and Vidur's piecewise fits).

Deviations of the machine from its profile are tracked as the ratio of measured to predicted times:
one ratio for steps with prompt chunks, and one for steps without.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from pdserve.protocol import StepCosts

RATIO_WEIGHT = 0.05  # of the newest step in the moving averages, after the first few
MOST_OFF = 2.0  # limit on the ratio of a single step: the process may have been paused in it
# After this many steps in a row that were off by this factor in the same direction, the machine has
# changed: a neighbour has come or gone, or the profile was wrong.
CHANGED_STEPS, CHANGED = 5, 1.25
# A node that is believed to be so much slower than profiled sees few steps or none, so nobody would
# ever find that it has recovered. So the belief is forgotten after a while without a step.
AVOIDED, FORGET_S = 2.0, 30.0
SETTLED_STEPS = 10  # without such a change: the predictions can be relied on
SATURATED = 0.95  # share of the best throughput, above which more tokens in a step gain little
_CANDIDATES = 256  # number of token counts evaluated to find the saturation point

# Costs to use until a node has measured its own: a small model on a small machine.
GUESS = StepCosts(knot_tokens=[1, 64], knot_s=[0.005, 0.016])


class StepRow(NamedTuple):
    """The part of a step that belongs to one request."""

    num_tokens: int
    num_before: int  # tokens whose KV is computed already
    is_decoding: bool = False  # one token; else a chunk of a prompt
    is_sampled: bool = True  # whether it reaches the request's newest token


@dataclass(frozen=True, slots=True)
class StepShape:
    """The quantities that a step's predicted time depends on."""

    num_tokens: int  # computed, over all rows
    num_sampled: int = 0  # rows that are sampled from
    prefill_pairs: int = 0  # queries x keys of chunks of prompts
    decode_context: int = 0  # tokens of context of decoding requests

    @classmethod
    def of(cls, rows: Iterable[StepRow]) -> StepShape:
        """Return the shape of a step with these rows."""
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
        """Whether the step contains no prompt chunk."""
        return self.prefill_pairs == 0


def chunk_pairs(num_tokens: int, num_before: int) -> int:
    """Return the query-key pairs of a causal chunk of `num_tokens` after `num_before` tokens."""
    return num_tokens * num_before + num_tokens * (num_tokens + 1) // 2


class PerfModel:
    """The profiled costs of one node, with a running correction.

    Policies ask for several predictions per step, so each one is only a few multiplications.
    """

    def __init__(
        self, costs: StepCosts = GUESS, prefill_ratio: float = 1.0, decode_ratio: float = 1.0
    ) -> None:
        self.prefill_ratio = prefill_ratio
        self.decode_ratio = decode_ratio
        self.prefill_error = 0.0  # moving average of |predicted / real - 1|
        self.decode_error = 0.0
        # Of steps with chunks of prompts, and of steps without:
        self._num_observed = [0, 0]
        self._observed_s = [0.0, 0.0]  # when the last one was
        self._is_tried = [False, False]
        self._num_off = [0, 0]  # that were off by CHANGED in a row; negative: too fast
        self.costs = costs

    @property
    def costs(self) -> StepCosts:
        """The profiled costs, without the correction."""
        return self._costs

    @costs.setter
    def costs(self, costs: StepCosts) -> None:
        """Replace the costs. The ratios are kept, and adapt with further observations."""
        self._costs = costs
        self._knots = costs.knot_tokens
        self._lines = _lines(costs)
        self._sampled_s = costs.sampled_s
        self._pair_s = costs.pair_s
        self._context_s = costs.context_s

    def is_known(self, shape: StepShape) -> bool:
        """Whether predictions for steps of this kind, with prompt chunks or without, are no guess.

        Steps of so many tokens are measured, or many steps have been predicted well. That stays so
        when the machine changes: predictions are off by a few times then.
        """
        is_measured = self._costs != GUESS and shape.num_tokens <= self._knots[-1]
        return is_measured or self._is_tried[shape.is_decode]

    def known_ratios(self, now_s: float) -> tuple[float, float]:
        """Return the ratios of steps with prompt chunks and without; 0 if none is known now."""
        return (
            self._known(self.prefill_ratio, now_s, is_decode=False),
            self._known(self.decode_ratio, now_s, is_decode=True),
        )

    def _known(self, ratio: float, now_s: float, *, is_decode: bool) -> float:
        is_old = now_s > self._observed_s[is_decode] + FORGET_S
        is_seen = self._num_observed[is_decode] > 0
        return ratio if is_seen and not (is_old and ratio > AVOIDED) else 0.0

    # ---- predictions, in seconds ---------------------------------------------------------------

    def step_s(self, shape: StepShape) -> float:
        """Return the predicted time of a step."""
        raw_s = self._raw_s(shape)
        return raw_s * (self.prefill_ratio if shape.prefill_pairs else self.decode_ratio)

    def decode_steps_s(self, shape: StepShape, num_steps: int) -> list[float]:
        """Return `step_s` of steps that decode the same requests; `shape` is that of the first one.

        With each step the context grows by a token per request.
        """
        ratio = self.decode_ratio
        return [raw_s * ratio for raw_s in self._raw_steps_s(shape, num_steps)]

    def decode_s(self, num_requests: int, num_context_tokens: int) -> float:
        """Return the predicted time of a decode step.

        `num_context_tokens` is the sum over all requests.
        """
        fixed_s, token_s = self._lines[bisect_left(self._knots, num_requests)]
        raw_s = (
            fixed_s
            + (token_s + self._sampled_s) * num_requests
            + self._context_s * num_context_tokens
        )
        return raw_s * self.decode_ratio

    def prompt_share(self, shape: StepShape) -> float:
        """Return which share of a step is for its chunks of prompts: what they add to decodes."""
        if not shape.prefill_pairs:
            return 0.0
        if not shape.decode_context:
            return 1.0
        return max(
            0.0, 1 - self.decode_s(shape.num_sampled, shape.decode_context) / self.step_s(shape)
        )

    def prefill_s(self, num_uncached: int, num_cached: int, token_budget: int) -> float:
        """Return the predicted time to prefill one prompt alone, in chunks of `token_budget`.

        The number of query-key pairs does not depend on the chunking.
        """
        num_full, num_left = divmod(num_uncached, token_budget)
        raw_s = self._sampled_s + self._pair_s * chunk_pairs(num_uncached, num_cached)
        if num_full:
            raw_s += num_full * self._tokens_s(token_budget)
        if num_left:
            raw_s += self._tokens_s(num_left)
        return raw_s * self.prefill_ratio if num_uncached else 0.0

    def saturating_tokens(self, most: int) -> int:
        """Return the fewest prompt tokens, up to `most`, that reach nearly the best throughput.

        This is DistServe's L_m.
        """
        step = max(1, most // _CANDIDATES)
        rates = {
            tokens: tokens / self.prefill_s(tokens, 0, most) for tokens in range(most, 0, -step)
        }
        best = max(rates.values())
        return min(tokens for tokens, rate in rates.items() if rate >= SATURATED * best)

    # ---- correction ----------------------------------------------------------------------------

    def observe(self, shape: StepShape, seconds: float, now_s: float = 0.0) -> None:
        """Update the correction with the measured time of a step that ended at `now_s`.

        The first few steps have equal weight; later ones enter a moving average with
        `RATIO_WEIGHT`. The deviation of one step is limited to a factor of `MOST_OFF`. So the model
        soon forgets a pause. When the machine has changed, the next steps count like the first
        ones, so a wrong profile or a neighbour that has gone is forgotten as soon.
        """
        self._correct(shape.is_decode, [self._raw_s(shape)], [seconds], now_s)

    def observe_decodes(
        self, shape: StepShape, seconds: Sequence[float], now_s: float
    ) -> list[float]:
        """Do as `observe` with the times of steps that `decode_steps_s` is about.

        Returns what `decode_s` predicts after each of them for the next one.
        """
        num_steps, num_requests = len(seconds), shape.num_sampled
        ratios = self._correct(True, self._raw_steps_s(shape, num_steps), seconds, now_s)
        fixed_s, token_s = self._lines[bisect_left(self._knots, num_requests)]
        fixed_s += (token_s + self._sampled_s) * num_requests
        context_s, second = self._context_s, shape.decode_context + num_requests
        contexts = range(second, second + num_steps * num_requests, num_requests)
        return [
            (fixed_s + context_s * context) * ratio
            for context, ratio in zip(contexts, ratios, strict=True)
        ]

    def _correct(
        self, is_decode: bool, raw_s: Sequence[float], seconds: Sequence[float], now_s: float
    ) -> list[float]:
        """Return the ratio after each step. `raw_s`: their times without it."""
        ratio, error = self.prefill_ratio, self.prefill_error
        if is_decode:
            ratio, error = self.decode_ratio, self.decode_error
        num_observed, num_off = self._num_observed[is_decode], self._num_off[is_decode]
        ratios = []
        for raw, real in zip(raw_s, seconds, strict=True):
            predicted = raw * ratio
            if predicted > 0 and real > 0:
                off = real / predicted
                if off > MOST_OFF:
                    off = MOST_OFF
                elif off < 1 / MOST_OFF:
                    off = 1 / MOST_OFF
                if off > CHANGED:
                    num_off = max(num_off, 0) + 1
                elif off < 1 / CHANGED:
                    num_off = min(num_off, 0) - 1
                else:
                    num_off = 0
                if num_off in (CHANGED_STEPS, -CHANGED_STEPS):
                    num_off = num_observed = 0
                num_observed += 1
                if num_observed == SETTLED_STEPS:
                    self._is_tried[is_decode] = True
                weight = 1 / (1 + num_observed)
                if weight < RATIO_WEIGHT:
                    weight = RATIO_WEIGHT
                ratio *= 1 + weight * (off - 1)
                error += weight * (abs(1 / off - 1) - error)
                self._observed_s[is_decode] = now_s
            ratios.append(ratio)
        if is_decode:
            self.decode_ratio, self.decode_error = ratio, error
        else:
            self.prefill_ratio, self.prefill_error = ratio, error
        self._num_observed[is_decode], self._num_off[is_decode] = num_observed, num_off
        return ratios

    def _raw_s(self, shape: StepShape) -> float:
        return self._without_context_s(shape) + self._context_s * shape.decode_context

    def _raw_steps_s(self, shape: StepShape, num_steps: int) -> list[float]:
        """Return the times of steps as profiled. Arguments as for `decode_steps_s`."""
        fixed_s, context_s = self._without_context_s(shape), self._context_s
        first, growth = shape.decode_context, shape.num_sampled
        contexts = range(first, first + num_steps * growth, growth)
        return [fixed_s + context_s * context for context in contexts]

    def _without_context_s(self, shape: StepShape) -> float:
        fixed_s, token_s = self._lines[bisect_left(self._knots, shape.num_tokens)]
        return (
            fixed_s
            + token_s * shape.num_tokens
            + self._sampled_s * shape.num_sampled
            + self._pair_s * shape.prefill_pairs
        )

    def _tokens_s(self, num_tokens: int) -> float:
        fixed_s, token_s = self._lines[bisect_left(self._knots, num_tokens)]
        return fixed_s + token_s * num_tokens


def _lines(costs: StepCosts) -> list[tuple[float, float]]:
    """Return (seconds at 0 tokens, seconds per token) for each segment between knots.

    Up to the first knot, the time is constant; beyond the last one, the last segment is extended.
    """
    knots = list(zip(costs.knot_tokens, costs.knot_s, strict=True))
    lines = [(knots[0][1], 0.0)]
    for (x0, y0), (x1, y1) in pairwise(knots):
        slope = (y1 - y0) / (x1 - x0)
        lines.append((y0 - slope * x0, slope))
    return [*lines, lines[-1]]
