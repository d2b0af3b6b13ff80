"""What a node's steps and pulls cost."""

from __future__ import annotations

from itertools import pairwise
from math import inf

from pdserve.errors import MalformedMessage
from pdserve.protocol.message import Message

_MOST_ROWS = 1 << 20  # of a step; predictions for a node are tabulated up to its own limit


class StepCosts(Message, frozen=True):
    """What a step of a node's engine costs, in seconds; see `pdserve/perf_model.py`.

    A step that computes n tokens and samples after m of them takes
    `knots(n) + sampled_s * m + pair_s * prefill pairs + context_s * decode context`.
    """

    knot_tokens: list[int]  # ascending; linear in between, and beyond the last
    knot_s: list[float]  # same length, not descending
    sampled_s: float = 0.0
    pair_s: float = 0.0  # per query-key pair of prompt chunks
    context_s: float = 0.0  # per context token of decoding requests


class TransferCosts(Message, frozen=True):
    """What a pull over one transport costs: `fixed_s + bytes / bytes_per_s`."""

    transport: str
    fixed_s: float
    bytes_per_s: float


class PerfReport(Message, frozen=True):
    """What a node's steps and pulls cost. Sent once measured, and again after large changes."""

    step: StepCosts
    token_budget: int  # most tokens of a step
    max_batch_size: int  # most requests of a step
    transfers: list[TransferCosts] = []

    def check(self) -> None:
        """Check a report that a node has sent.

        Raises:
            MalformedMessage: a limit or a cost is impossible.
        """
        if not all(0 < size <= _MOST_ROWS for size in (self.token_budget, self.max_batch_size)):
            raise MalformedMessage(
                f"PerfReport: token_budget {self.token_budget} and max_batch_size "
                f"{self.max_batch_size} must be from 1 to {_MOST_ROWS}"
            )
        step = self.step
        knots = step.knot_tokens
        is_line = (
            knots and len(knots) == len(step.knot_s) and all(a < b for a, b in pairwise(knots))
        )
        if not (is_line and knots[0] > 0):
            raise MalformedMessage(
                f"PerfReport: the knots must be positive and rise, each with a time: {step}"
            )
        above_0 = [*step.knot_s, *(costs.bytes_per_s for costs in self.transfers)]
        others = [step.sampled_s, step.pair_s, step.context_s]
        others += [costs.fixed_s for costs in self.transfers]
        if not (all(0 < x < inf for x in above_0) and all(0 <= x < inf for x in others)):
            raise MalformedMessage(
                f"PerfReport: costs must be finite, and times of steps and speeds above 0: {self}"
            )
