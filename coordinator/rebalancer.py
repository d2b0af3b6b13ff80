"""When a node is to change pools: one pool is late for long, and the other has time to spare.

After Arrow, whose roles are labels too; the guards against swinging to and fro are those that such
systems share:

    hysteresis   a pool asks for a node at a load of LATE; the other one gives it away only if its
                 load stays below SPARE without it, so the node is not asked back at once
    sustained    it has asked at SUSTAINED_TICKS looks in a row; a burst is the queues' business
    cooldown     the last turn must be COOLDOWN_S ago, to show what it did
    dwell        a node stays in a pool for DWELL_S, whoever has put it there
    at least one node is left in each pool; when both are late, nothing is gained by a turn

No event loop in here, and no messages: loads come in, a decision comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from pdserve.clock import Clock
from pdserve.protocol import NodeRole

LATE = 1.0  # of what was promised
SPARE = 0.7
SUSTAINED_TICKS = 3
COOLDOWN_S = 10.0
DWELL_S = 30.0


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """One attached node."""

    node_id: str
    role: NodeRole
    load: float | None  # of its promise, in its role (1: just kept); None: it takes no legs yet
    left_over: int = 0  # what it would have to finish in its former role; comparable in a pool
    may_turn: bool = True  # whether it can work for the other pool


@dataclass(frozen=True, slots=True)
class Turn:
    """A node is to work for this pool from now on."""

    node_id: str
    role: NodeRole


def other(role: NodeRole) -> NodeRole:
    """The other pool."""
    return NodeRole.DECODE if role is NodeRole.PREFILL else NodeRole.PREFILL


def pool_load(nodes: Iterable[NodeLoad], role: NodeRole) -> float | None:
    """The mean load of a pool; infinite without any node, None while none is ready."""
    pool = [node for node in nodes if node.role is role]
    loads = [node.load for node in pool if node.load is not None]
    if loads:
        return sum(loads) / len(loads)
    return None if pool else inf


class Rebalancer:
    """The policy of one coordinator; `tick` is called at a steady pace."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[str, tuple[NodeRole, float]] = {}  # node id |-> its role, and since when
        self._short: NodeRole | None = None  # the pool that asked for a node at the last look
        self._num_ticks = 0  # for which it has done so
        self._last_turn_s = -inf

    def tick(self, nodes: Sequence[NodeLoad]) -> Turn | None:
        """A look at all nodes, and what follows from it."""
        now_s = self._clock.now()
        self._note_roles(nodes, now_s)
        short = next((role for role in NodeRole if _is_short(nodes, role)), None)
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
            if node.role is other(short)
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
        """A role that somebody else has changed is a new stay as well."""
        since = {node.node_id: (node.role, now_s) for node in nodes}
        kept = {name: stay for name, stay in self._since.items() if name in since}
        self._since = since | {
            name: stay for name, stay in kept.items() if stay[0] is since[name][0]
        }


def _is_short(nodes: Sequence[NodeLoad], role: NodeRole) -> bool:
    """Whether a pool is late, and the other one can spare a node."""
    load, others_load = pool_load(nodes, role), pool_load(nodes, other(role))
    num_others = sum(node.role is other(role) and node.load is not None for node in nodes)
    if load is None or others_load is None or load < LATE or num_others < 2:
        return False
    return load == inf or others_load * num_others / (num_others - 1) < SPARE
