"""Where the job is predicted to be done best."""

from __future__ import annotations

from itertools import count

from coordinator.routing.candidates import Candidates
from pdserve._native import cheapest

EQUAL = 0.1  # predictions that differ by less are equal: they are not better than that


class Predicted:
    """The least predicted time; of equals the one with the least to do, and of these by turns.

    Mooncake's choice (its algorithm 1), with times from the performance model. A small batch costs
    hardly more than a batch of one: without the second rule one node would get them all.
    """

    def __init__(self) -> None:
        self._turns = count()

    def pick(self, candidates: Candidates) -> int:
        """As Policy."""
        best = cheapest(candidates.cost_s, candidates.load, candidates.slots, EQUAL)
        return best[next(self._turns) % len(best)] if len(best) > 1 else best[0]
