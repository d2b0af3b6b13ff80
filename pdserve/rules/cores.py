"""How the two phases of a node split its cores: multiplexed mode.

A phase alone has all cores. While both compute, decodes have as many as their streams need to keep
their TPOT, and prompts have the rest; each has at least one. Nodes decide by this rule
(`pdserve/node/split_cores`), and so does the simulation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """By which factors decode steps take longer on some of the cores than on all of them."""

    cores: Sequence[int]  # ascending, from 1 to all
    factors: Sequence[float]  # of each of these; falling, and 1 for all

    @classmethod
    def proportional(cls, num_cores: int) -> Slowdowns:
        """Half of the cores take twice as long: what is assumed of steps that nobody measured."""
        return cls((1, num_cores), (float(num_cores), 1.0))

    def at(self, cores: float) -> float:
        """Return the factor for this number of cores.

        Between two numbers that were measured, a part of the step is divided among the cores, and
        the other part is not.
        """
        index = bisect_left(self.cores, cores)
        if index in (0, len(self.cores)):
            return self.factors[min(index, len(self.cores) - 1)]
        low, high = self.cores[index - 1], self.cores[index]
        share = (1 / low - 1 / cores) / (1 / low - 1 / high)
        return self.factors[index - 1] + share * (self.factors[index] - self.factors[index - 1])


def cores_for_decodes(num_cores: int, step_s: Callable[[int], float], limit_s: float) -> int:
    """Return how many of at least two cores a decode step gets while prompts are computed, too.

    These are the fewest with which it takes no longer than `limit_s`, or all but one.

    Args:
        num_cores: of the node.
        step_s: the predicted time of the step on so many cores; falls as they rise.
        limit_s: how long it may take; infinite if nothing is promised.
    """
    fewer = range(1, num_cores - 1)
    return 1 + bisect_left(fewer, True, key=lambda cores: step_s(cores) <= limit_s)
