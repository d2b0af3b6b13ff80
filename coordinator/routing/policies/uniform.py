"""Any node."""

from __future__ import annotations

from random import Random

from coordinator.routing.candidates import Candidates


class Uniform:
    """Each with equal chances; what every other policy should beat."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def pick(self, candidates: Candidates) -> int:
        """As Policy."""
        return int(candidates.slots[self._random.randrange(len(candidates.slots))])
