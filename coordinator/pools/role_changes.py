"""Moves nodes from one pool to the other, for operators and for the rebalancer.

A role is a label: a node that changes it keeps its weights, its KV and its running requests. Its
next load report shows the new role, and from then on it is sent the other kind of legs. A node on
standby works for no pool until it is given a role, be it the one that it was started with.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from coordinator.nodes.registry import Member, Registry
from coordinator.pools.desired import DesiredNodes
from coordinator.pools.rebalancer import Turn
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole, NodeState, SetRole
from pdserve.settings.config import Mode
from pdserve.shared.errors import DeadlineExceeded, NodeLost, NodeNotFound, RoleRefused

log = logging.getLogger(__name__)

# The pools that each mode needs to serve requests.
NEEDED: dict[Mode, tuple[NodeRole, ...]] = {
    "disaggregated": (NodeRole.PREFILL, NodeRole.DECODE),
    "colocated": (NodeRole.DECODE,),
    "adaptive": (),  # a node of either pool can serve whole requests
    "flowing": (),
    "multiplexed": (NodeRole.DECODE,),
}


@dataclass(slots=True)
class _Order:
    """A role change that a node was told to make and has not reported yet."""

    role: NodeRole
    was_seen: bool = False  # whether a report has shown the new role
    is_over: asyncio.Event = field(default_factory=asyncio.Event)  # carried out, or void


class RoleChanges:
    """The roles of one coordinator's members."""

    def __init__(self, registry: Registry, mode: Mode, metrics: CoordinatorMetrics) -> None:
        self._registry = registry
        self._mode = mode
        self._metrics = metrics
        self._orders: dict[Member, _Order] = {}
        registry.on_changed(self._reported)
        registry.on_lost(self._lost)

    async def change(
        self, node_id: str, role: NodeRole, *, force: bool = False, within_s: float
    ) -> bool:
        """Move a node to a pool, and wait until it reports the new role.

        Returns False if it had the role already, and has loaded: one that loads is told so all the
        same, lest it go on standby. With `force`, its former pool may become empty.

        Raises:
            NodeNotFound, RoleRefused: see `order`.
            RoleRefused: also if another order replaces this one before it is carried out.
            NodeLost: the node was lost before it reported the role.
            DeadlineExceeded: the node did not report the role within `within_s`.
        """
        member = self.find(node_id)
        order = self._order(member, role, force=force)
        if order is None:
            return False
        try:
            async with asyncio.timeout(within_s):
                await order.is_over.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{node_id} has not reported its new role within {within_s:g} s"
            ) from error
        if member not in self._registry:
            raise NodeLost(f"{node_id} is gone")
        if not order.was_seen:
            raise RoleRefused(f"{node_id} was given another role before this change was complete")
        return True

    def order(self, node_id: str, role: NodeRole) -> None:
        """Tell a node to move to a pool; does not wait.

        Raises:
            NodeNotFound: there is no such node; lists the attached ones.
            RoleRefused: the node cannot change, or its pool would have no ready node left.
        """
        self._order(self.find(node_id), role)

    def num_serving(self, role: NodeRole) -> int:
        """Return the number of nodes that work for a pool, or were told to, and shall not end."""
        return sum(
            (member.is_ready or member.is_standby)
            and not member.is_told_to_drain
            and self._role_of(member) is role
            for member in self._registry
        )

    def is_free(self, member: Member) -> bool:
        """Return whether a node is on standby, and was told neither to begin nor to end."""
        return self._role_of(member) is None and not member.is_told_to_drain

    def may_become(self, member: Member, role: NodeRole) -> bool:
        """Return whether a node could work for a pool at all."""
        if role is member.role:
            return True
        return not member.hello.refusal(role)

    def check_may_leave(self, member: Member) -> None:
        """Check that a node's pool can do without it. Raises RoleRefused."""
        role = self._role_of(member)
        if role is None or role not in NEEDED[self._mode]:
            return
        if not self._others(member, role):
            name = role.name.lower()
            raise RoleRefused(
                f"{member.node_id} is the only ready {name} node, and {self._mode} mode needs one: "
                f"without it every request is refused until there is another {name} node; "
                "use force to take it away all the same"
            )

    def find(self, node_id: str) -> Member:
        """Return a node. Raises NodeNotFound; lists the attached ones."""
        if (found := self._registry.find(node_id)) is not None:
            return found
        names = ", ".join(sorted(member.node_id for member in self._registry))
        raise NodeNotFound(
            f'there is no node "{node_id}"; attached: {names or "none"}', param="node"
        )

    def _order(self, member: Member, role: NodeRole, *, force: bool = False) -> _Order | None:
        former, order = self._role_of(member), self._orders.get(member)
        if former is role and (order is not None or member.load.state is not NodeState.LOADING):
            return order  # None: it has reported that role
        if member.is_told_to_drain or member.load.state is NodeState.DRAINING:
            raise RoleRefused(f"{member.node_id} is draining: it takes no more work of any kind")
        if refusal := member.hello.refusal(role):
            raise RoleRefused(
                f"{member.node_id} cannot become a {role.name.lower()} node: {refusal}"
            )
        if former is not None and former is not role and not force:
            self.check_may_leave(member)
        if order is not None:
            order.is_over.set()  # it is replaced
        order = self._orders[member] = _Order(role)
        member.send(SetRole(role=role))
        log.info("%s is to become a %s node", member.node_id, role.name.lower())
        return order

    def _role_of(self, member: Member) -> NodeRole | None:
        """Return the role that the node has, or was ordered to take; None: it is on standby."""
        order = self._orders.get(member)
        if order is not None:
            return order.role
        return None if member.is_standby else member.role

    def _others(self, member: Member, role: NodeRole) -> list[Member]:
        """Return the ready nodes that a pool keeps without this member."""
        return [
            other
            for other in self._registry
            if other is not member
            and other.is_ready
            and not other.is_told_to_drain
            and self._role_of(other) is role
        ]

    def _reported(self, member: Member) -> None:
        order = self._orders.get(member)
        if order is not None and order.role is member.role and not member.is_standby:
            del self._orders[member]
            self._metrics.role_changes.labels(role=member.role.name.lower()).inc()
            log.info("%s is a %s node", member.node_id, member.role.name.lower())
            order.was_seen = True
            order.is_over.set()

    def _lost(self, member: Member) -> None:
        order = self._orders.pop(member, None)
        if order is not None:
            order.is_over.set()


def carry_out(turn: Turn, changes: RoleChanges, desired: DesiredNodes) -> None:
    """Have a node turn, as the rebalancer has decided; one that may not is logged, and stays."""
    try:
        changes.order(turn.node_id, turn.role)
    except (NodeNotFound, RoleRefused) as error:
        log.warning("rebalancing: %s", error)
    else:
        desired.turned(turn.role)
