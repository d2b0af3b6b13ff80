"""What a decode node computes next."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.request import Scheduled
from pdserve.engine.scheduler import Queues


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """Decoding requests first, then chunks of local prompts in what is left of the budget.

    Sarathi-Serve's stall-free batching: a prompt never makes the running streams wait for longer
    than one step of `token_budget` tokens. And they never make a prompt that has begun wait for
    ever, however many keep coming: one row of one token is its own.
    """

    token_budget: int
    max_batch_size: int

    def plan(self, queues: Queues) -> list[Scheduled]:
        """Decodes, then prefill chunks."""
        has_begun_prompt = any(not request.is_decoding for request in queues.running)
        decodes = queues.plan_decodes(self.max_batch_size - has_begun_prompt)
        prefills = queues.plan_prefills(
            max(self.token_budget - len(decodes), int(has_begun_prompt)),
            self.max_batch_size - len(decodes),
        )
        return decodes + prefills
