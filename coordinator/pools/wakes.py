"""Which node wakes as which model: nodes that no model keeps for itself go where requests wait.

A model is *asleep* without the nodes that its mode needs. Its weights are packed files, so a node
wakes as it in the running process: it drains, gives its KV back, maps the other file, and joins
anew. That costs whoever it served before, so one node is moved at a time and pool, by this rule:

    gain   requests for a model that is asleep, whether in line or interrupted as their nodes left,
           and those in line for one that has been too busy for BUSY_S. Each counts for one, and
           more the nearer its deadline is: two at the deadline. It counts for one more with each
           AGE_S that it has waited, so that it waits for no stream of others for ever. A tenant
           has a share of the wakes (`wake_shares.py`).
    cost   requests that run on the node, and the gain of its model's own if that would be asleep:
           of two models that have half of what they need, one gives way, however many wakes were
           made for those who wait.

Requests of the lowest class, as lines of batches, count only among themselves. They take no node
from a model that others asked for lately: KEPT times as long ago as its own wake takes, or less.

A node is taken from the model where it costs least, if the gain is larger; never below a model's
`min`, and not before it was awake for as long as its own wake takes: half of its time at most goes
into wakes. Of a node with several places, a model has one; while that waits for memory there,
another node may be ordered, too. Of several coordinators one leads, and knows who waits for it
alone. So each of the others orders, too, for those that have waited for longer than a wake of the
leader's would have taken.

An order has failed if nothing has come of it in ORDER_S, or the node has come back as another
model's. It is given again: at once after the first failure, PAUSE_S after the second, twice as long
after each further one, MOST_PAUSE_S at most. A node that could not wake as the model says so, and
others are asked before it. After two such refusals the model cannot be served: who waits for it
need not wait on, until it is tried again. Once nodes have said nothing else for HOPELESS_S, who is
refused need not come again either: each try takes a node from others. No event loop, no messages:
what there is comes in, orders come out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from coordinator.pools.role_changes import NEEDED
from coordinator.pools.wake_shares import WakeShares
from coordinator.pools.wake_times import WakeTimes
from pdserve.protocol import NodeRole
from pdserve.settings.config import Mode

BUSY_S: Final = 2.0
AGE_S: Final = 10.0
ORDER_S: Final = 30.0
KEPT: Final = 10.0
FOLLOW_S: Final = 1.0  # for which who does not lead gives the leader more time than a wake takes
PAUSE_S: Final = 2.0  # nodes die for other reasons, too, and others may be idle
MOST_PAUSE_S: Final = 60.0
HOPELESS_S: Final = 3600.0  # in which who runs it hears of it, and may put it right


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in line, or one whose nodes have gone."""

    tenant: str
    waited_s: float
    within_s: float  # it may wait that long in all
    is_urgent: bool = True  # it is not of the lowest of several classes, as lines of batches are


@dataclass(frozen=True, slots=True)
class AwakeNode:
    """A member of a model's cluster."""

    node_id: str
    incarnation: str
    role: NodeRole
    is_ready: bool
    num_requests: int  # running or waiting there
    may_become: frozenset[str]  # names of models
    place_of: str = ""  # the node whose cores and memory it shares with others; empty: none
    refused: str = ""  # the model that it could not become before it was one of this one
    lacks_memory: bool = False  # it is not ready, since other places keep what that takes

    @property
    def host(self) -> str:
        """The node whose memory it has, with that of others or alone."""
        return self.place_of or self.node_id


@dataclass(frozen=True, slots=True)
class ModelNow:
    """One model as it is now."""

    name: str
    least: Mapping[NodeRole, int]  # nodes that are always its own
    nodes: Sequence[AwakeNode]
    waiting: Sequence[Waiting]
    urgent_share: float = 1.0  # of its requests on nodes
    urgent_s: float = -inf  # when an urgent request for it was last there

    def has(self, roles: Iterable[NodeRole]) -> bool:
        """Return whether it has a node in one of these pools, or one that is about to be ready."""
        return any(node.role in roles and not node.lacks_memory for node in self.nodes)


def needed_pools(mode: Mode) -> list[frozenset[NodeRole]]:
    """Return the pools of which a model needs a node each; where one of either will do, both."""
    return [frozenset({role}) for role in NEEDED[mode]] or [frozenset(NodeRole)]


@dataclass(frozen=True, slots=True)
class Wake:
    """An order: this node is to become one of that model."""

    node_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Coming:
    """When a model will have a node that wakes as it."""

    in_s: float
    is_ordered: bool  # else so long after the order, which those who wait bring about


@dataclass(slots=True)
class _Ordered:
    model: str
    role: NodeRole
    incarnation: str  # of the node as it was
    at_s: float
    heard_s: float  # when its node last said that it lacks memory; before that, `at_s`

    @property
    def lacks_memory(self) -> bool:
        return self.heard_s > self.at_s


@dataclass(slots=True)
class _Failures:
    """Orders for a model that have failed, one after the other."""

    at_s: float = 0.0  # the last one
    number: int = 0
    num_refused: int = 0  # of the last ones: their nodes have said so
    refused_since_s: float = 0.0  # the first of these
    refused_by: set[str] = field(default_factory=set)  # `AwakeNode.host`


_NONE_FAILED: Final = _Failures()


@dataclass(slots=True)
class Wakes:
    """The policy of one coordinator."""

    pools: Sequence[frozenset[NodeRole]]  # a model needs a node of each
    times: WakeTimes = field(default_factory=lambda: WakeTimes(ORDER_S))
    num_ordered: Counter[str] = field(default_factory=Counter)  # by model
    again_s: float = inf  # when a node may leave that some wait for, and had just woken
    _orders: dict[str, _Ordered] = field(default_factory=dict)  # by node id
    _since_s: dict[str, tuple[str, float]] = field(default_factory=dict)  # node |-> (life, ready)
    _failed: dict[str, _Failures] = field(default_factory=dict)
    _shares: WakeShares = field(default_factory=WakeShares)
    # For orders of another coordinator: each ready node's model, and when others left theirs.
    _ready: dict[str, str] = field(default_factory=dict)
    _left: dict[str, tuple[str, float]] = field(default_factory=dict)

    def watch(self, models: Sequence[ModelNow], now_s: float) -> None:
        """Learn from the wakes that another coordinator orders, while this one does not lead."""
        ready = {n.node_id: model.name for model in models for n in model.nodes if n.is_ready}
        for node_id in self._ready.keys() - ready.keys():
            self._left[node_id] = self._ready[node_id], now_s
        for node_id in self._left.keys() & ready.keys():
            former, left_s = self._left.pop(node_id)
            if ready[node_id] != former and now_s - left_s < ORDER_S:
                self.times.learn(ready[node_id], now_s - left_s)
        self._left = {n: left for n, left in self._left.items() if now_s - left[1] < ORDER_S}
        self._ready = ready

    def decide(self, models: Sequence[ModelNow], now_s: float, *, leads: bool = True) -> list[Wake]:
        """Return the orders to give now; they are taken to be given."""
        self._follow(models, now_s)
        self._share(models, now_s)
        self.again_s = inf
        wakes = []
        asking = models if leads else [self._left_waiting(model) for model in models]
        for model in sorted(asking, key=lambda m: self._gains(m, now_s), reverse=True):
            if self._put_off_s(model.name, now_s):
                continue
            for pool in self.pools:
                wake = self._wake(model, pool, models, now_s)
                if wake is not None:
                    wakes.append(wake)
        return wakes

    def coming(self, model: str, now_s: float) -> Coming | None:
        """Return when a model without nodes has one; None: nobody knows, since orders failed.

        An order that is late by some time is expected to take as long again.
        """
        expected_s = self.times.expected_s(model)
        orders = [order for order in self._orders.values() if order.model == model]
        begun = [now_s - order.at_s for order in orders if not order.lacks_memory]
        if begun:
            left_s = max(min(abs(expected_s - for_s), ORDER_S - for_s) for for_s in begun)
            return Coming(max(0.0, left_s), is_ordered=True)
        is_unknown = orders or self._put_off_s(model, now_s)
        return None if is_unknown else Coming(expected_s, is_ordered=False)

    def _left_waiting(self, model: ModelNow) -> ModelNow:
        """Return the model with only those waiting for whom the leader has not woken it."""
        least_s = self.times.expected_s(model.name) + FOLLOW_S
        return replace(model, waiting=[one for one in model.waiting if one.waited_s >= least_s])

    def refused_s(self, model: str, now_s: float) -> float:
        """Return for how long it cannot be served, since nodes could not wake as it.

        0: it can; infinite: it could not for so long that it is not worth coming again.
        """
        failures = self._failed.get(model, _NONE_FAILED)
        left_s = self._put_off_s(model, now_s) if failures.num_refused > 1 else 0.0
        return inf if left_s and now_s - failures.refused_since_s >= HOPELESS_S else left_s

    def _put_off_s(self, model: str, now_s: float) -> float:
        failures = self._failed.get(model, _NONE_FAILED)
        if failures.number < 2:
            return 0.0
        pause_s = min(MOST_PAUSE_S, PAUSE_S * 2.0 ** min(failures.number - 2, 10))
        return max(0.0, failures.at_s + pause_s - now_s)

    def _follow(self, models: Sequence[ModelNow], now_s: float) -> None:
        """Note which orders have been carried out, and which have failed."""
        ready: dict[str, tuple[str, AwakeNode]] = {}
        lacking: set[str] = set()
        for model in models:
            lacking |= {node.node_id for node in model.nodes if node.lacks_memory}
            for node in model.nodes:
                life, _ = self._since_s.get(node.node_id, ("", 0.0))
                if node.is_ready and life != node.incarnation:
                    self._since_s[node.node_id] = node.incarnation, now_s
                if node.is_ready:
                    ready[node.node_id] = model.name, node
        here = {node.node_id for model in models for node in model.nodes} | self._orders.keys()
        self._since_s = {name: since for name, since in self._since_s.items() if name in here}
        for node_id, order in list(self._orders.items()):
            name, found = ready.get(node_id, ("", None))
            if node_id in lacking:
                order.heard_s = now_s
            if found is not None and found.incarnation != order.incarnation:
                del self._orders[node_id]
                if name == order.model:
                    if not order.lacks_memory:
                        self.times.learn(name, now_s - order.at_s)
                    self._failed.pop(name, None)
                else:  # if not refused: it died, or became what another coordinator has ordered
                    refused_by = found.host if found.refused == order.model else ""
                    self._note_failure(order.model, now_s, refused_by)
            elif now_s - order.heard_s >= ORDER_S:
                del self._orders[node_id]
                self._note_failure(order.model, now_s)

    def _note_failure(self, model: str, now_s: float, refused_by: str = "") -> None:
        failures = self._failed.setdefault(model, _Failures())
        failures.at_s = now_s
        failures.number += 1
        if not failures.num_refused:
            failures.refused_since_s = now_s
        failures.num_refused = failures.num_refused + 1 if refused_by else 0
        failures.refused_by |= {refused_by} - {""}

    def _share(self, models: Sequence[ModelNow], now_s: float) -> None:
        """Share the time that goes into wakes between tenants."""
        roles = {n.node_id: n.role for model in models for n in model.nodes if n.may_become}
        roles |= {node_id: order.role for node_id, order in self._orders.items()}
        num_nodes = min(sum(role in pool for role in roles.values()) for pool in self.pools)
        waiting = {one.tenant for model in models for one in model.waiting}
        self._shares.look(waiting, num_nodes, now_s)

    def _gains(self, model: ModelNow, now_s: float) -> tuple[float, float]:
        """Return what a wake is worth to urgent requests, and to all."""
        urgent = [one for one in model.waiting if one.is_urgent]
        gain = self._gain(model, urgent, now_s)
        others = [one for one in model.waiting if not one.is_urgent]
        return gain, gain + self._gain(model, others, now_s)

    def _gain(self, model: ModelNow, waiting: Sequence[Waiting], now_s: float) -> float:
        wake_s, tenants = self.times.expected_s(model.name), {one.tenant for one in waiting}
        weights = {name: self._shares.weight(name, model.name) for name in tenants}
        return sum(
            (
                1
                + min(1.0, (one.waited_s + wake_s) / max(one.within_s, wake_s))
                + one.waited_s / AGE_S
            )
            * weights[one.tenant]
            for one in waiting
        )

    def _wake(
        self, model: ModelNow, pool: frozenset[NodeRole], models: Sequence[ModelNow], now_s: float
    ) -> Wake | None:
        """Return the order for a node of this pool, if the model needs one and one may be taken."""
        is_coming = any(
            order.model == model.name and order.role in pool and not order.lacks_memory
            for order in self._orders.values()
        )
        if not model.waiting or is_coming:
            return None
        longest_s = max(one.waited_s for one in model.waiting)
        if model.has(pool) and (longest_s < BUSY_S or self._is_loading(model, pool)):
            return None
        found = list(self._givable(model, pool, models, now_s))
        if not found:
            return None
        refused_by = self._failed.get(model.name, _NONE_FAILED).refused_by
        node = min(found, key=lambda one: (one[2].host in refused_by, *one[:2]))[2]
        self._orders[node.node_id] = _Ordered(
            model.name, node.role, node.incarnation, at_s=now_s, heard_s=now_s
        )
        self.num_ordered[model.name] += 1
        tenants = {one.tenant for one in model.waiting}
        waited_for = [name for name in tenants if self._shares.weight(name, model.name)]
        takes_s = self.times.expected_s(model.name)
        self._shares.made_for(waited_for, model.name, takes_s, now_s)
        return Wake(node.node_id, model.name)

    def _givable(
        self, model: ModelNow, pool: frozenset[NodeRole], models: Sequence[ModelNow], now_s: float
    ) -> Iterator[tuple[float, float, AwakeNode]]:
        """Yield nodes that it is worth to take from others: cost, since when it is ready, node."""
        has_places = self._where_awake(model, models)
        of_urgent, of_all = self._gains(model, now_s)
        for other in models:
            is_kept = now_s - other.urgent_s < max(BUSY_S, KEPT * self.times.expected_s(other.name))
            gain = of_urgent if is_kept else of_all
            for node in other.nodes if other.name != model.name and gain > 0 else ():
                is_elsewhere = node.role in pool and node.place_of not in has_places
                if is_elsewhere and self._may_leave(other, node, model.name, now_s):
                    cost = self._cost(other, node, now_s, of_urgent=of_urgent > 0)
                    if (cost, other.name) < (gain, model.name):  # a draw has a winner, too
                        yield cost, self._since_s[node.node_id][1], node

    def _where_awake(self, model: ModelNow, models: Sequence[ModelNow]) -> set[str]:
        """Return the nodes of which the model has a place: two are no more than one."""
        waking = {name for name, order in self._orders.items() if order.model == model.name}
        nodes = [node for other in models for node in other.nodes if node.node_id in waking]
        return {node.place_of for node in [*model.nodes, *nodes] if node.place_of}

    def _is_loading(self, model: ModelNow, pool: frozenset[NodeRole]) -> bool:
        return any(
            node.role in pool and not (node.is_ready or node.lacks_memory) for node in model.nodes
        )

    def _may_leave(self, model: ModelNow, node: AwakeNode, name: str, now_s: float) -> bool:
        if not node.is_ready or node.node_id in self._orders or name not in node.may_become:
            return False
        is_its_own = self._num_staying(model, node.role) <= model.least.get(node.role, 0)
        # By its own wake: by that of who waits, the quickest to wake would always be first.
        leaves_s = self._since_s[node.node_id][1] + self.times.expected_s(model.name)
        if is_its_own or now_s >= leaves_s:
            return not is_its_own
        self.again_s = min(self.again_s, leaves_s)
        return False

    def _num_staying(self, model: ModelNow, role: NodeRole) -> int:
        return sum(
            node.role is role and node.is_ready and node.node_id not in self._orders
            for node in model.nodes
        )

    def _cost(self, model: ModelNow, node: AwakeNode, now_s: float, *, of_urgent: bool) -> float:
        is_last = self._num_staying(model, node.role) == 1
        missed, missed_by_all = self._gains(model, now_s) if is_last else (0.0, 0.0)
        if of_urgent:
            return node.num_requests * model.urgent_share + missed
        return node.num_requests + missed_by_all
