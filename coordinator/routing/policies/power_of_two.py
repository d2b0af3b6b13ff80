"""The power-of-two-choices policy."""

from __future__ import annotations

from random import Random

from coordinator.routing.candidates import Candidates


class PowerOfTwo:
    """Draws two nodes at random and picks the less loaded one (Mitzenmacher).

    Known loads may be stale; the random draw keeps routers from all choosing the same node.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        slots, load = candidates.slots, candidates.load
        first, second = (int(slots[self._random.randrange(len(slots))]) for _ in range(2))
        return first if load[first] <= load[second] else second
