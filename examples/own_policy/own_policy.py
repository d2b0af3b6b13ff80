"""Policies of one's own: the order of prompts, the batch of a decode node, the choice of a node."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.routing.candidates import Candidates
from decode_node.policies.decodes_first import MaxBatch
from pdserve.engine.prompts.order import PromptRule, QueuedPrompt
from pdserve.engine.request import Request
from pdserve.measured.perf_model import PerfModel
from pdserve.shared.clock import Clock

SMALL = 2  # requests
LONG = 256  # tokens


class NewestFirst(PromptRule):
    """Computes the prompt first that came last: good for whoever asks now, bad for who waits."""

    def __init__(self, perf: PerfModel, token_budget: int, clock: Clock) -> None:
        """It predicts nothing, and needs none of these."""

    def order(self, prompts: list[QueuedPrompt], now_s: float) -> list[QueuedPrompt]:
        """Return the newest first."""
        return sorted(prompts, key=lambda prompt: -prompt.request.lifecycle.received_s)

    def served(self, request: Request, seconds: float) -> None:
        """Do nothing: this order does not depend on past service."""


class SmallBatch(MaxBatch):
    """Decodes few requests at a time, however many could."""

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """Return whether the batch is smaller than SMALL."""
        return len(members) < SMALL


class LongLast:
    """Sends long prompts to the last node of a pool, and all others to the first one."""

    def pick(self, candidates: Candidates) -> int:
        """Return a slot; see `coordinator.routing.candidates.RoutingPolicy`."""
        is_long = candidates.request.prompt.num_tokens > LONG
        return int(candidates.slots[-1 if is_long else 0])
