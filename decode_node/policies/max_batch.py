"""`max-batch`: as many requests as `max_batch_size` says, whatever that does to their TPOT."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from decode_node.policies.decodes_first import DecodesFirst
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues


class MaxBatch(DecodesFirst):
    """What vLLM does, and Sarathi-Serve with one token budget: a prompt never makes the running
    streams wait for longer than one step of `token_budget` tokens. The baseline."""

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """While there are fewer."""
        return len(members) < self.max_batch_size

    def pick(self, decoding: list[Request], most: int) -> list[Request]:
        """The oldest."""
        return decoding[:most]

    def limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """None: the budget of tokens bounds a step."""
        return inf
