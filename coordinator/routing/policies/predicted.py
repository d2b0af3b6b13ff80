"""The policy of the least predicted cost."""

from __future__ import annotations

from itertools import count

from coordinator.routing.candidates import Candidates
from pdserve._native import cheapest

EQUAL = 0.1  # predictions that differ by less count as equal: they are no more accurate


class Predicted:
    """Picks the least predicted time; among equals the least loaded node, and then in turns.

    This is Mooncake's choice (its algorithm 1), with times from the performance model. A small
    batch costs hardly more than a batch of one, so without the second rule one node would get all
    requests.
    """

    def __init__(self) -> None:
        self._turns = count()

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        best = cheapest(candidates.cost_s, candidates.load, candidates.slots, EQUAL)
        return best[next(self._turns) % len(best)] if len(best) > 1 else best[0]
