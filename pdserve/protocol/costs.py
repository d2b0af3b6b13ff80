"""What a node can do: the costs of its steps and of its pulls."""

from __future__ import annotations

from pdserve.protocol.message import Message


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
