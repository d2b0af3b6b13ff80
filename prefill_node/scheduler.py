"""What a prefill node computes next."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.request import Scheduled
from pdserve.engine.scheduler import Queues


@dataclass(frozen=True, slots=True)
class FcfsBudget:
    """First come first served; chunks up to a token budget together (DistServe's L_m)."""

    token_budget: int
    max_batch_size: int

    def plan(self, queues: Queues) -> list[Scheduled]:
        """As many prompts as the budget holds, the last one perhaps in part."""
        return queues.plan_prefills(self.token_budget, self.max_batch_size)
