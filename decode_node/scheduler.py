"""What a decode node computes next."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.request import Scheduled
from pdserve.engine.scheduler import Queues


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """Every decoding request first, then chunks of local prompts in what is left of the budget.

    Sarathi-Serve's stall-free batching: a prompt never makes the running streams wait for longer
    than one step of `token_budget` tokens.
    """

    token_budget: int
    max_batch_size: int

    def plan(self, queues: Queues) -> list[Scheduled]:
        """Decodes, then prefill chunks."""
        decodes = queues.plan_decodes(self.max_batch_size)
        prefills = queues.plan_prefills(
            self.token_budget - len(decodes), self.max_batch_size - len(decodes)
        )
        return decodes + prefills
