"""What a node can do: the costs of its steps and of its pulls."""

from __future__ import annotations

from itertools import pairwise
from math import inf

from pdserve.errors import MalformedMessage
from pdserve.protocol.message import Message

_MOST_ROWS = 1 << 20  # of a step; whoever predicts for a node tabulates as many


class StepCosts(Message, frozen=True):
    """What a step of a node's engine costs: `pdserve/perf_model.py`. Times in seconds.

    A step that computes n tokens, m of which are sampled from, takes
    `knots(n) + sampled_s * m + pair_s * prefill pairs + context_s * decode context`.
    """

    knot_tokens: list[int]  # ascending; linear in between, and on beyond the last
    knot_s: list[float]  # of the same length, not descending
    sampled_s: float = 0.0
    pair_s: float = 0.0  # per query and key of chunks of prompts
    context_s: float = 0.0  # per token of context of decoding requests


class TransferCosts(Message, frozen=True):
    """What a pull over one transport costs: `fixed_s + bytes / bytes_per_s`."""

    transport: str
    fixed_s: float
    bytes_per_s: float


class PerfReport(Message, frozen=True):
    """What a node can do. Sent when it is known, and when what it has learned differs much."""

    step: StepCosts
    token_budget: int  # most tokens of a step
    max_batch_size: int  # most requests of a step
    transfers: list[TransferCosts] = []

    def check(self) -> None:
        """That what came from elsewhere can be true: steps take time, and are of some size.

        Raises:
            MalformedMessage: it cannot.
        """
        if not all(0 < size <= _MOST_ROWS for size in (self.token_budget, self.max_batch_size)):
            raise MalformedMessage(
                f"PerfReport: a step of {self.token_budget} tokens and {self.max_batch_size} "
                f"requests at most, instead of 1 to {_MOST_ROWS}"
            )
        step = self.step
        knots = step.knot_tokens
        is_line = (
            knots and len(knots) == len(step.knot_s) and all(a < b for a, b in pairwise(knots))
        )
        if not (is_line and knots[0] > 0):
            raise MalformedMessage(f"PerfReport: no line through the knots of {step}")
        above_0 = [*step.knot_s, *(costs.bytes_per_s for costs in self.transfers)]
        others = [step.sampled_s, step.pair_s, step.context_s]
        others += [costs.fixed_s for costs in self.transfers]
        if not (all(0 < x < inf for x in above_0) and all(0 <= x < inf for x in others)):
            raise MalformedMessage(f"PerfReport: costs that are no times or speeds: {self}")
