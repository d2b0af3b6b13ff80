"""`max-batch`: runs up to `max_batch_size` requests, whatever that does to their TPOT."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from decode_node.policies.decodes_first import DecodesFirst
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues


class MaxBatch(DecodesFirst):
    """The baseline: batches like vLLM, and like Sarathi-Serve with one token budget.

    A prompt delays the running streams by at most one step of `token_budget` tokens.
    """

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """Whether the batch has fewer than `max_batch_size` requests."""
        return len(members) < self.max_batch_size

    def pick(self, decoding: list[Request], most: int) -> list[Request]:
        """Return the oldest requests."""
        return decoding[:most]

    def limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """Return infinity: only the token budget bounds a step."""
        return inf
