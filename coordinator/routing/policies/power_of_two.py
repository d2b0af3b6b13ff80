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
        slots, load = candidates.slots, candidates.load
        first, second = (int(slots[self._random.randrange(len(slots))]) for _ in range(2))
        return first if load[first] <= load[second] else second
