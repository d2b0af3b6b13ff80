"""What a prefill node computes next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.request import Scheduled
from pdserve.engine.scheduler import Queues


@dataclass(frozen=True, slots=True)
class FcfsBudget:
    """First come first served; chunks up to a token budget together (DistServe's L_m).

    A prompt is begun only if so many blocks stay free beside it, or if it is alone: nothing runs,
    and no KV waits to be pulled. Otherwise KV that nobody pulls would fill the pool, and push out
    the prefixes that others could reuse.
    """

    token_budget: int
    max_batch_size: int
    num_kept_free: int = 0
    num_pinned: Callable[[], int] = lambda: 0  # blocks held for others to pull

    def plan(self, queues: Queues) -> list[Scheduled]:
        """As many prompts as the budget holds, the last one perhaps in part."""
        return queues.plan_prefills(
            self.token_budget,
            self.max_batch_size,
            self.num_kept_free,
            is_alone=self.num_pinned() == 0,
        )
