"""The better of two nodes that chance has picked."""

from __future__ import annotations

from random import Random

from coordinator.routing.candidates import Candidates


class PowerOfTwo:
    """Two at random, then the one with less to do (Mitzenmacher).

    What is known of loads may be old: chance keeps routers from all sending to the same node.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def pick(self, candidates: Candidates) -> int:
        """As Policy."""
        num = len(candidates.slots)
        first, second = self._random.randrange(num), self._random.randrange(num)
        load = candidates.load
        return int(candidates.slots[first if load[first] <= load[second] else second])
