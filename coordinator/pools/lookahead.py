"""Looks some minutes ahead: what so many nodes would cost, and how many promises they would break.

The load of a pool is known as it would be with any number of nodes (`loads.py`), and how arrivals
will change (`coordinator/admission/arrivals.py`). So the next minutes are played through, for one
node fewer, as many as now, and more. A node that is added works once it has started, or at once if
one is on standby or the other pool has it to spare; one fewer goes at once. Each costs its price
for all that time. A request that misses its promise costs as much as a node for a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, erfc, exp, log, sqrt
from typing import Final

from coordinator.admission.arrivals import RECENT_S, Arrivals
from coordinator.pools.desired import GROWTH, PoolDemand
from pdserve.protocol import NodeRole
from pdserve.shared.clock import Clock

STEP_S: Final = 15.0
LEAST_AHEAD_S: Final = 120.0
MOST_AHEAD_S: Final = 600.0
STARTS_AHEAD: Final = 3.0  # node starts that are looked ahead
LEAST_STRESS: Final = 0.2
DEVIATIONS: Final = 2.0  # of what comes by chance in half a minute, which is all that "last" sees
MISS_S: Final = 60.0  # of a node, which a missed promise is worth
SPREAD: Final = 0.1  # standard deviation of a load from one request to the next
NEW_S: Final = 60.0  # of arrivals, which the load of a pool is about
FULL: Final = 0.9  # share of the time that a pool computes, from which on it may be behind
NEWEST: Final = 0.01  # weight of what was seen last, each half second
MOST_WORK: Final = 16.0  # times what prompts take alone: as many coordinators, say
_FINE: Final = 32  # of more nodes, about one in so many is looked at
_ALIKE: Final = 0.02  # loads of numbers of nodes that differ by less are taken for one


def missed(load: float) -> float:
    """Return how many promises a pool breaks for each request; a half where it just keeps them.

    Above that it is ever more than one: what is not done then delays those that come later.
    """
    return 0.5 * erfc((1.0 - load) / (SPREAD * sqrt(2.0))) * max(1.0, load)


@dataclass(slots=True)
class Ahead:
    """The next minutes of one pool."""

    demand: PoolDemand
    price: float  # of a node, relative to the mean of both pools
    start_s: float  # until a node that is added works
    growth: list[float]  # at each step: tokens or KV, relative to what the load is about
    busy: list[float]  # nodes that prompts keep busy
    rates: list[float]  # requests/s
    stress: float = 1.2  # times what is forecast must be borne before a node goes
    _loads: dict[int, float] = field(default_factory=dict)

    def cost(self, number: int, stress: float = 1.0) -> float:
        """Return what so many nodes cost, in seconds of a node of the mean price.

        With `stress`, so many times more comes than is forecast.
        """
        total, queued_s = 0.0, 0.0
        if self.demand.prompts is not None:
            queued_s = self.demand.prompts.queued_s
        for index, rate in enumerate(self.rates):
            has_started = index * STEP_S >= self.start_s
            serving = number if has_started else min(number, self.demand.ready)
            queued_s = max(0.0, queued_s + (stress * self.busy[index] - serving) * STEP_S)
            load = self._load(index, serving / stress, queued_s / stress)
            broken = stress * rate * MISS_S * missed(load)
            total += STEP_S * (self.price * number + broken)
        return total

    def cheapest(self, least: int) -> int:
        """Return the number of nodes, from `least` on, up to which each one more costs less."""
        most = max(GROWTH * self.demand.ready, ceil(GROWTH * max(self.busy)))
        number, cost = least, self.cost(least)
        while number < most:
            more = min(most, number + 1 + number // _FINE)
            if (of_more := self.cost(more)) >= cost:
                break
            number, cost = more, of_more
        return number

    def is_enough(self, number: int) -> bool:
        """Return whether one node more would cost more, even if more comes than is forecast."""
        return self.cost(number, self.stress) < self.cost(number + 1, self.stress)

    def _load(self, index: int, serving: float, queued_s: float) -> float:
        """Return the load at a step, with what waits by its end."""
        if (prompts := self.demand.prompts) is not None:
            return max(self.busy[index], queued_s / prompts.ttft_s) / serving
        step = round(log(serving / max(self.growth[index], 1e-3)) / _ALIKE)
        if step not in self._loads:
            self._loads[step] = self.demand.load_with(exp(step * _ALIKE))
        return self._loads[step]


class LookAhead:
    """The next minutes of the pools of one coordinator."""

    def __init__(
        self,
        arrivals: Arrivals,
        clock: Clock,
        start_s: Callable[[NodeRole], float],
        prices: Mapping[NodeRole, float],
    ) -> None:
        """`start_s`: until a pool's next node would work; `prices`: of a node's hour."""
        self._arrivals = arrivals
        self._clock = clock
        self._start_s = start_s
        self._prices = prices
        # Moving means of what prompts keep busy: nodes, and by what each takes alone.
        self._busy = self._alone = 0.0

    def at(self, role: NodeRole, demand: PoolDemand) -> Ahead | None:
        """Return the next minutes of a pool; None while nothing is known of what comes."""
        arrivals = self._arrivals
        arrivals.look(self._clock.now())
        if not arrivals.are_known or not demand.ready:
            return None
        start_s = self._start_s(role)
        until_s = min(max(LEAST_AHEAD_S, STARTS_AHEAD * start_s), MOST_AHEAD_S)
        steps = range(round(until_s / STEP_S))
        forecasts = [arrivals.forecast(index * STEP_S) for index in steps]
        present = arrivals.recent_rate(NEW_S)
        work = 1.0
        if demand.prompts is not None:
            self._learn(demand.prompts.busy, demand.ready, arrivals.recent_busy(NEW_S))
            work = min(self._busy / self._alone, MOST_WORK) if self._alone else 1.0
        return Ahead(
            demand,
            price=self._prices[role] * len(self._prices) / sum(self._prices.values()),
            start_s=start_s,
            growth=[arrivals.growth(index * STEP_S, NEW_S) for index in steps],
            busy=[work * busy for _, busy in forecasts],
            rates=[rate for rate, _ in forecasts],
            stress=1.0 + max(LEAST_STRESS, DEVIATIONS / sqrt(max(1.0, present * RECENT_S))),
        )

    def _learn(self, busy: float, ready: int, alone: float) -> None:
        """Learn what prompts take together, and with those of other coordinators.

        A pool with hardly a pause does not tell: more may be asked of it than it does.
        """
        if busy < FULL * ready:
            self._busy += NEWEST * (busy - self._busy)
            self._alone += NEWEST * (alone - self._alone)
