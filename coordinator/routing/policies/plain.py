"""The policies that choose by numbers alone: predictions, loads, turns or chance."""

from __future__ import annotations

from itertools import count
from random import Random

from coordinator.routing.candidates import Candidates, Job
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


class LeastLoaded:
    """Picks the node with the fewest pending prompt tokens, or decoding requests, at present."""

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        slots = candidates.slots
        return int(slots[candidates.load.take(slots).argmin()])


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


class RoundRobin:
    """Picks the next slot after the last one chosen for the job, even if nodes have changed."""

    def __init__(self) -> None:
        self._last: dict[Job, int] = {}

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        slots = candidates.slots
        following = slots.searchsorted(self._last.get(candidates.job, -1), side="right")
        slot = int(slots[following % len(slots)])
        self._last[candidates.job] = slot
        return slot


class Uniform:
    """Picks each node with equal probability: the baseline that other policies should beat."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        return int(candidates.slots[self._random.randrange(len(candidates.slots))])
