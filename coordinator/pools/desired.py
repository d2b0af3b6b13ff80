"""How many nodes each pool should have: what an autoscaler is to make true.

A pool is asked what load it would have with so many nodes, measured from what its nodes do now:

    prefill   the time that its nodes compute, as a share of all; and its queues
    decode    time per token and blocks in use, as if its streams came to so many nodes

Up, as soon as a pool is too busy for a while; how far is limited by what the pool is now, since a
pool that is far behind knows only that. Down, one node at a time, if the others would have time to
spare for a minute, and never on missing data: a node that loads, is silent or was not measured may
be why the others are idle. A number above that of the nodes there are delays none of them.
Where the next minutes are foreseen (`lookahead.py`), that number is wanted which costs least then,
and one fewer if that would do. With `sleep_after_s`, to none after so long without any request, and
to one of each with the next one. No event loop, no messages: demands come in, numbers come out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeAlias

from pdserve.protocol import NodeRole
from pdserve.settings.config import Mode
from pdserve.shared.clock import Clock

BUSY: Final = 0.8  # load from which on a pool needs more nodes
SPARE: Final = 0.55  # load below which one node fewer would do
SUSTAINED_S: Final = 4.0  # for which a pool must be too busy; a flip, which is cheaper, is faster
IDLE_S: Final = 60.0  # for which a node must be superfluous
UNKNOWN_S: Final = 600.0  # for which a pool waits to know of nodes that load or are silent
RETURN_S: Final = 20.0  # for which nodes come back to a coordinator that was started again
GROWTH: Final = 2  # most desired nodes per ready one

# The pools that a mode has nodes in.
POOLS: Final[Mapping[Mode, tuple[NodeRole, ...]]] = {
    "disaggregated": (NodeRole.PREFILL, NodeRole.DECODE),
    "colocated": (NodeRole.DECODE,),
    "adaptive": (NodeRole.PREFILL, NodeRole.DECODE),
    "flowing": (NodeRole.PREFILL, NodeRole.DECODE),
    "multiplexed": (NodeRole.DECODE,),
}


@dataclass(frozen=True, slots=True)
class PromptDemand:
    """The prompts of one pool as they are now."""

    busy: float  # nodes that compute
    queued_s: float  # seconds of one node's work that wait
    ttft_s: float  # promised


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """One pool as it is now."""

    ready: int  # nodes that work, and are measured
    others: int  # that are attached and do not (they load, say), or of which nothing is known yet
    load_with: Callable[[float], float]  # the mean load if so many nodes did the work
    prompts: PromptDemand | None = None  # of a pool that computes them

    def of_share(self, share: float) -> PoolDemand:
        """Return the demand of a part of the load."""
        prompts = self.prompts
        return replace(
            self,
            load_with=lambda number: share * self.load_with(number),
            prompts=prompts
            and PromptDemand(share * prompts.busy, share * prompts.queued_s, prompts.ttft_s),
        )


@dataclass(slots=True)
class _Pool:
    desired: int
    attached: int = 0
    busy_since_s: float | None = None
    enough_since_s: dict[int, float] = field(default_factory=dict)  # by number of nodes
    unknown_since_s: float | None = None  # since when there are others, on and off
    unknown_s: float = 0.0  # when there were any for the last time

    def waits_for(self, others: int, now_s: float) -> bool:
        """Return whether others may still come, so that what they are there for is not known."""
        if others:
            self.unknown_s = now_s
            if self.unknown_since_s is None:
                self.unknown_since_s = now_s
        elif now_s - self.unknown_s > IDLE_S:
            self.unknown_since_s = None
        since_s = self.unknown_since_s
        return others > 0 and since_s is not None and now_s - since_s < UNKNOWN_S


class Foreseen(Protocol):
    """What a pool's next minutes would come to."""

    def is_enough(self, number: int) -> bool:
        """Return whether one node more would cost more, even if more comes than is forecast."""
        ...

    def cheapest(self, least: int) -> int:
        """Return the number of nodes, from `least` on, up to which each one more costs less."""
        ...


Foresee: TypeAlias = Callable[[NodeRole, PoolDemand], Foreseen | None]
"""Returns the next minutes of a pool; None: they are not known."""


class DesiredNodes:
    """The policy of one coordinator; `tick` must be called at regular intervals."""

    def __init__(
        self,
        clock: Clock,
        sleep_after_s: float = 0.0,
        foresee: Foresee = lambda role, demand: None,
    ) -> None:
        """`sleep_after_s`: seconds without a request after which no nodes are desired; 0: never."""
        self._clock = clock
        self._foresee = foresee
        self._sleep_after_s = sleep_after_s
        self._began_s = self._last_request_s = self._last_tick_s = clock.now()
        self._pools: dict[NodeRole, _Pool] = {}

    @property
    def numbers(self) -> dict[NodeRole, int]:
        """The desired number of nodes of each pool; empty before the first tick."""
        return {role: pool.desired for role, pool in self._pools.items()}

    def tick(self, demands: Mapping[NodeRole, PoolDemand], num_requests: int = 0) -> None:
        """Look at the pools that the mode needs; `num_requests` run or wait now."""
        now_s = self._clock.now()
        if num_requests:
            self._last_request_s = now_s
        if now_s - self._last_tick_s >= SUSTAINED_S:  # nobody has looked: nothing has lasted
            for pool in self._pools.values():
                pool.busy_since_s, pool.enough_since_s = None, {}
        self._last_tick_s = now_s
        is_asleep = 0 < self._sleep_after_s <= now_s - self._last_request_s
        for role, demand in demands.items():
            attached = max(1, demand.ready + demand.others)
            if is_asleep:
                self._pools[role] = _Pool(0)
                continue
            pool = self._pools.setdefault(role, _Pool(attached))
            pool.attached = attached
            is_new = now_s - self._began_s < RETURN_S
            pool.desired = max(1, pool.desired, demand.ready if is_new else 0)
            if demand.ready:
                self._look(pool, demand, self._foresee(role, demand))
            else:  # nothing is known: what there is has to come up
                pool.desired = max(pool.desired, attached)
                pool.busy_since_s, pool.enough_since_s = None, {}

    def turned(self, role: NodeRole) -> None:
        """Note that a node moves to this pool: the other one was found to have it to spare."""
        taker, giver = self._pools.get(role), self._pools.get(role.other)
        if taker is not None and giver is not None:
            taker.desired = max(taker.desired, taker.attached + 1)
            giver.desired = max(1, min(giver.desired, giver.attached - 1))

    def _look(self, pool: _Pool, demand: PoolDemand, foreseen: Foreseen | None) -> None:
        now_s = self._clock.now()
        wanted = _enough(demand) if foreseen is None else foreseen.cheapest(pool.desired)
        waits = pool.waits_for(demand.others, now_s)
        enough = [] if waits else _enough_of_fewer(pool.desired, demand, foreseen)
        pool.busy_since_s = _since(pool.busy_since_s, now_s, holds=wanted > pool.desired)
        pool.enough_since_s = {n: pool.enough_since_s.get(n, now_s) for n in enough}
        long_enough = [n for n, since_s in pool.enough_since_s.items() if now_s - since_s >= IDLE_S]
        if pool.busy_since_s is not None and now_s - pool.busy_since_s >= SUSTAINED_S:
            pool.desired = wanted
        elif long_enough:
            pool.desired = min(long_enough)
            if pool.desired < demand.ready:
                pool.enough_since_s = {}  # what that does has to be seen first


def _enough(demand: PoolDemand) -> int:
    """Return the fewest nodes that would not be too busy."""
    most = GROWTH * demand.ready
    numbers = range(1, most)
    return 1 + bisect_left(numbers, x=True, key=lambda n: demand.load_with(n) <= BUSY)


def _enough_of_fewer(desired: int, demand: PoolDemand, foreseen: Foreseen | None) -> list[int]:
    """Return which numbers would do: one fewer than there are, and as many if more are desired."""
    least = min(desired, demand.ready) - 1
    return [
        number
        for number in range(max(1, least), min(desired, demand.ready + 1))
        if (demand.load_with(number) < SPARE if foreseen is None else foreseen.is_enough(number))
    ]


def _since(before_s: float | None, now_s: float, *, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if before_s is None else before_s
