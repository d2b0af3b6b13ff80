"""Decides when a node changes pools: one pool is overloaded for long, and the other has capacity.

The design follows Arrow, where roles are labels, too. The guards against oscillation are the usual
ones:

    hysteresis   a pool needs a node at a load of LATE; the other pool gives one away only if its
                 load stays below SPARE without it, so the node is not needed back at once
    sustained    the pool must need it at SUSTAINED_TICKS ticks in a row; queues absorb bursts
    cooldown     the last turn must be COOLDOWN_S ago, so that its effect is visible
    dwell        a node stays in a pool for DWELL_S, whoever moved it there
    at least one node is left in each pool; when both are late, or were by turns within DWELL_S, a
    turn gains nothing

A pool that will need a node is late, too, if the other one will have it to spare (`desired.py`).

There is no event loop here, and there are no messages: loads come in, a decision comes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from pdserve.protocol import NodeRole
from pdserve.shared.clock import Clock

LATE = 1.0  # load at which promises are just kept
SPARE = 0.7
SUSTAINED_TICKS = 3
COOLDOWN_S = 10.0
DWELL_S = 30.0


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """The load of one attached node."""

    node_id: str
    role: NodeRole
    load: float | None  # relative to the promise of its role (1: just kept); None: takes no legs
    left_over: int = 0  # work to finish in its former role; comparable within a pool
    may_turn: bool = True  # whether it can work for the other pool, and KV could still move


@dataclass(frozen=True, slots=True)
class Turn:
    """The decision that a node changes to this pool."""

    node_id: str
    role: NodeRole


def pool_load(nodes: Iterable[NodeLoad], role: NodeRole) -> float | None:
    """Return the mean load of a pool; infinite without nodes, None while no node has a load."""
    pool = [node for node in nodes if node.role is role]
    loads = [node.load for node in pool if node.load is not None]
    if loads:
        return sum(loads) / len(loads)
    return None if pool else inf


class Rebalancer:
    """The policy of one coordinator; `tick` must be called at regular intervals."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[str, tuple[NodeRole, float]] = {}  # node id |-> (role, since)
        self._short: NodeRole | None = None  # the pool that needed a node at the last tick
        self._num_ticks = 0  # for how many ticks in a row
        self._last_turn_s = -inf
        self._last_late_s = dict.fromkeys(NodeRole, -inf)  # of each pool

    def tick(
        self, nodes: Sequence[NodeLoad], desired: Mapping[NodeRole, int] = MappingProxyType({})
    ) -> Turn | None:
        """Look at all nodes, and return the turn to make, if any.

        `desired`: how many nodes each pool should have soon, as far as that is known.
        """
        now_s = self._clock.now()
        self._note_roles(nodes, now_s)
        self._note_late(nodes, now_s)
        short = next((role for role in NodeRole if self._is_short(nodes, role, desired)), None)
        self._num_ticks = self._num_ticks + 1 if short is self._short else 1
        self._short = short
        if (
            short is None
            or self._num_ticks < SUSTAINED_TICKS
            or now_s - self._last_turn_s < COOLDOWN_S
        ):
            return None
        able = [
            node
            for node in nodes
            if node.role is short.other
            and node.load is not None
            and node.may_turn
            and now_s - self._since[node.node_id][1] >= DWELL_S
        ]
        if not able:
            return None
        node = min(able, key=lambda node: (node.left_over, node.node_id))
        self._last_turn_s = now_s
        return Turn(node.node_id, short)

    def _note_roles(self, nodes: Sequence[NodeLoad], now_s: float) -> None:
        """Note since when each node has its role, whoever changed it."""
        since = {node.node_id: (node.role, now_s) for node in nodes}
        kept = {name: stay for name, stay in self._since.items() if name in since}
        self._since = since | {
            name: stay for name, stay in kept.items() if stay[0] is since[name][0]
        }

    def _note_late(self, nodes: Sequence[NodeLoad], now_s: float) -> None:
        for role in NodeRole:
            load = pool_load(nodes, role)
            if load is not None and load >= LATE:
                self._last_late_s[role] = now_s

    def _is_short(
        self, nodes: Sequence[NodeLoad], role: NodeRole, desired: Mapping[NodeRole, int]
    ) -> bool:
        """Return whether a pool is late, or will be, and the other one can spare a node."""
        numbers = Counter(node.role for node in nodes if node.load is not None)
        lacking = {pool: number - numbers[pool] for pool, number in desired.items()}
        num_others = numbers[role.other]
        if num_others > 1 and lacking.get(role, 0) > 0 > lacking.get(role.other, 0):
            return True
        load, others_load = pool_load(nodes, role), pool_load(nodes, role.other)
        if load is None or others_load is None or load < LATE or num_others < 2:
            return False
        if load == inf:
            return True
        own, other = max(0, lacking.get(role, 0)), lacking.get(role.other, 0)
        if other * numbers[role] > own * num_others:
            return False  # for its size, the other one will soon need more than this one
        is_idle = others_load * num_others / (num_others - 1) < SPARE
        return is_idle and self._clock.now() - self._last_late_s[role.other] >= DWELL_S
