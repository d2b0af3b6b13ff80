"""Which node wakes as which model: nodes that no model keeps for itself go where requests wait.

A model is *asleep* without the nodes that its mode needs. Its weights are packed files, so a node
wakes as it in the running process: it drains, gives its KV back, maps the other file, and joins
anew. That costs whoever it served before, so one node is moved at a time and pool, by this rule:

    gain   requests for a model that is asleep, whether in line or interrupted as their nodes left,
           and those in line for one that has been too busy for BUSY_S. Each counts
           for one, and more the nearer its deadline is: two at the deadline. It counts for one
           more with each AGE_S that it has waited, so that it waits for no stream of others for
           ever. Those of a tenant count for less the more other models were woken for it lately,
           so that who asks for all in turn cannot thrash.
    cost   requests that run on the node, and the gain of its model's own if that would be asleep:
           of two models that have half of what they need, one gives way, however many wakes were
           made for those who wait.

A node is taken from the model where it costs least, if the gain is larger; never below a model's
`min`, and not before it was awake for as long as its own wake takes: half of its time at most goes
into wakes. Of a node with several places, a model has one. Of several coordinators one leads, and
knows who waits for it alone. So each of the others orders, too, for those that have waited for
longer than a wake of the leader's would have taken.

An order has failed if nothing has come of it in ORDER_S, or the node has come back as another
model's. It is given again: at once after the first failure, PAUSE_S after the second, twice as long
after each further one, MOST_PAUSE_S at most. A node that has come back as what it was, without
having died, could not wake as the model. After two such failures the model cannot be served: who
waits for it need not wait on, until it is tried again. No event loop, no messages: what there is
comes in, orders come out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from coordinator.pools.role_changes import NEEDED
from coordinator.pools.wake_times import WakeTimes
from pdserve.protocol import NodeRole
from pdserve.settings.config import Mode

BUSY_S: Final = 2.0
AGE_S: Final = 10.0
ORDER_S: Final = 30.0
FOLLOW_S: Final = 1.0  # for which who does not lead gives the leader more time than a wake takes
PAUSE_S: Final = 2.0  # nodes die for other reasons, too, and others may be idle
MOST_PAUSE_S: Final = 60.0
LATELY_S: Final = 60.0  # for which a wake counts against the tenants that it was made for


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in line, or one whose nodes have gone."""

    tenant: str
    waited_s: float
    within_s: float  # it may wait that long in all


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
    has_woken: bool = False  # its process was a node before


@dataclass(frozen=True, slots=True)
class ModelNow:
    """One model as it is now."""

    name: str
    least: Mapping[NodeRole, int]  # nodes that are always its own
    nodes: Sequence[AwakeNode]
    waiting: Sequence[Waiting]

    def has(self, roles: Iterable[NodeRole]) -> bool:
        """Return whether it has a node in one of these pools, or one that is loading."""
        return any(node.role in roles for node in self.nodes)


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
    former: str  # model of the node
    role: NodeRole
    incarnation: str  # of the node as it was
    at_s: float


@dataclass(slots=True)
class _Failures:
    """Orders for a model that have failed, one after the other."""

    at_s: float = 0.0  # the last one
    number: int = 0
    num_refused: int = 0  # of the last ones: their nodes live, and are what they were


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
    _made_for: deque[tuple[float, str, str]] = field(default_factory=deque)  # (when, whom, model)
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
        self.again_s = inf
        wakes = []
        asking = models if leads else [self._left_waiting(model) for model in models]
        for model in sorted(asking, key=lambda m: -self._gain(m, now_s)):
            if self._is_put_off(model.name, now_s):
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
        begun = [now_s - order.at_s for order in self._orders.values() if order.model == model]
        if begun:
            left_s = max(min(abs(expected_s - for_s), ORDER_S - for_s) for for_s in begun)
            return Coming(max(0.0, left_s), is_ordered=True)
        return None if self._is_put_off(model, now_s) else Coming(expected_s, is_ordered=False)

    def _left_waiting(self, model: ModelNow) -> ModelNow:
        """Return the model with only those waiting for whom the leader has not woken it."""
        least_s = self.times.expected_s(model.name) + FOLLOW_S
        return replace(model, waiting=[one for one in model.waiting if one.waited_s >= least_s])

    def cannot_serve(self, model: str, now_s: float) -> bool:
        """Return whether nodes could not wake as it, and it is not tried again now."""
        return self._is_put_off(model, now_s) and self._failed[model].num_refused > 1

    def _is_put_off(self, model: str, now_s: float) -> bool:
        failures = self._failed.get(model, _Failures())
        pause_s = min(MOST_PAUSE_S, PAUSE_S * 2.0 ** min(failures.number - 2, 10))
        return failures.number > 1 and now_s - failures.at_s < pause_s

    def _follow(self, models: Sequence[ModelNow], now_s: float) -> None:
        """Note which orders have been carried out, and which have failed."""
        ready: dict[str, tuple[str, AwakeNode]] = {}
        for model in models:
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
            if found is not None and found.incarnation != order.incarnation:
                del self._orders[node_id]
                if name == order.model:
                    self.times.learn(name, now_s - order.at_s)
                    self._failed.pop(name, None)
                else:  # it died, and was started again; or became what another has ordered
                    is_refusal = found.has_woken and name == order.former
                    self._note_failure(order.model, now_s, is_refusal=is_refusal)
            elif now_s - order.at_s >= ORDER_S:
                del self._orders[node_id]
                self._note_failure(order.model, now_s, is_refusal=False)
        while self._made_for and now_s - self._made_for[0][0] >= LATELY_S:
            self._made_for.popleft()

    def _note_failure(self, model: str, now_s: float, *, is_refusal: bool) -> None:
        failures = self._failed.setdefault(model, _Failures())
        failures.at_s = now_s
        failures.number += 1
        failures.num_refused = failures.num_refused + 1 if is_refusal else 0

    def _gain(self, model: ModelNow, now_s: float) -> float:
        others = {made[1:] for made in self._made_for if made[2] != model.name}
        lately = Counter(tenant for tenant, _ in others)
        wake_s = self.times.expected_s(model.name)
        return sum(
            (
                1
                + min(1.0, (one.waited_s + wake_s) / max(one.within_s, wake_s))
                + one.waited_s / AGE_S
            )
            / (1 + lately[one.tenant])
            for one in model.waiting
        )

    def _wake(
        self, model: ModelNow, pool: frozenset[NodeRole], models: Sequence[ModelNow], now_s: float
    ) -> Wake | None:
        """Return the order for a node of this pool, if the model needs one and one may be taken."""
        is_coming = any(
            order.model == model.name and order.role in pool for order in self._orders.values()
        )
        if not model.waiting or is_coming:
            return None
        longest_s = max(one.waited_s for one in model.waiting)
        if model.has(pool) and (longest_s < BUSY_S or self._is_loading(model, pool)):
            return None
        has_places = self._where_awake(model, models)
        found = [
            (self._cost(other, node, now_s), other.name, self._since_s[node.node_id][1], node)
            for other in models
            if other.name != model.name
            for node in other.nodes
            if node.role in pool
            and node.place_of not in has_places
            and self._may_leave(other, node, model.name, now_s)
        ]
        if not found:
            return None
        cost, from_name, _, node = min(found, key=lambda one: (one[0], one[2]))
        if (cost, from_name) >= (self._gain(model, now_s), model.name):  # a draw has a winner, too
            return None
        self._orders[node.node_id] = _Ordered(
            model.name, from_name, node.role, node.incarnation, now_s
        )
        self.num_ordered[model.name] += 1
        for tenant in {one.tenant for one in model.waiting}:
            self._made_for.append((now_s, tenant, model.name))
        return Wake(node.node_id, model.name)

    def _where_awake(self, model: ModelNow, models: Sequence[ModelNow]) -> set[str]:
        """Return the nodes of which the model has a place: two are no more than one."""
        waking = {name for name, order in self._orders.items() if order.model == model.name}
        nodes = [node for other in models for node in other.nodes if node.node_id in waking]
        return {node.place_of for node in [*model.nodes, *nodes] if node.place_of}

    def _is_loading(self, model: ModelNow, pool: frozenset[NodeRole]) -> bool:
        return any(node.role in pool and not node.is_ready for node in model.nodes)

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

    def _cost(self, model: ModelNow, node: AwakeNode, now_s: float) -> float:
        is_last = self._num_staying(model, node.role) == 1
        return node.num_requests + (self._gain(model, now_s) if is_last else 0.0)
