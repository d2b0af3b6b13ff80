"""The random policy."""

from __future__ import annotations

from random import Random

from coordinator.routing.candidates import Candidates


class Uniform:
    """Picks each node with equal probability: the baseline that other policies should beat."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        return int(candidates.slots[self._random.randrange(len(candidates.slots))])
