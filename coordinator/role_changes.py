"""Moving nodes from one pool to the other, for operators and for the rebalancer.

A node changes its role by changing a label; it keeps its weights, its KV and the requests it has
begun. Its next load report shows the new role, and from then on it is sent the other kind of legs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.rebalancer import Turn
from coordinator.registry import Member, Registry
from pdserve.config import Mode
from pdserve.errors import DeadlineExceeded, NodeLost, NodeNotFound, RoleRefused
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole, NodeState, SetRole

log = logging.getLogger(__name__)

# Pools without which a mode serves nobody.
NEEDED: dict[Mode, tuple[NodeRole, ...]] = {
    "disaggregated": (NodeRole.PREFILL, NodeRole.DECODE),
    "colocated": (NodeRole.DECODE,),
    "adaptive": (),  # either kind of node does all of a request, if need be
}


@dataclass(slots=True)
class _Order:
    """What a node was told and has not reported yet."""

    role: NodeRole
    was_seen: bool = False  # in one of its reports
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
        """Have a node work for a pool, and wait until it says so; False: it did already.

        Raises:
            NodeNotFound, RoleRefused: as `order`.
            RoleRefused: also if it is told otherwise meanwhile.
            NodeLost: it went away meanwhile.
            DeadlineExceeded: it has not said so in time.
        """
        member = self._find(node_id)
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
            raise RoleRefused(f"{node_id} was told otherwise before it could change its role")
        return True

    def order(self, node_id: str, role: NodeRole) -> None:
        """Tell a node to work for a pool from now on.

        Raises:
            NodeNotFound: there is no such node; says which there are.
            RoleRefused: it cannot, or its pool would be empty.
        """
        self._order(self._find(node_id), role)

    def _find(self, node_id: str) -> Member:
        for member in self._registry:
            if member.node_id == node_id:
                return member
        names = ", ".join(sorted(member.node_id for member in self._registry))
        raise NodeNotFound(
            f'there is no node "{node_id}"; attached: {names or "none"}', param="node"
        )

    def _order(self, member: Member, role: NodeRole, *, force: bool = False) -> _Order | None:
        former = self._role_of(member)
        if former is role:
            return self._orders.get(member)  # None: it has that role, and has said so
        if member.load.state is NodeState.DRAINING:
            raise RoleRefused(f"{member.node_id} is draining: it takes no more work of any kind")
        if role is NodeRole.PREFILL and member.hello.prefill_refusal:
            raise RoleRefused(
                f"{member.node_id} cannot become a prefill node: {member.hello.prefill_refusal}"
            )
        if not force and former in NEEDED[self._mode] and not self._others(member, former):
            name = former.name.lower()
            raise RoleRefused(
                f"{member.node_id} is the only ready {name} node, and {self._mode} mode needs one: "
                f"without it every request is refused until another {name} node is there; "
                "force it if that is what you want"
            )
        if (replaced := self._orders.get(member)) is not None:
            replaced.is_over.set()
        order = self._orders[member] = _Order(role)
        member.send(SetRole(role=role))
        log.info("%s is to become a %s node", member.node_id, role.name.lower())
        return order

    def _role_of(self, member: Member) -> NodeRole:
        """The role it has, or will have in a moment."""
        order = self._orders.get(member)
        return order.role if order is not None else member.role

    def _others(self, member: Member, role: NodeRole) -> list[Member]:
        """Who is left to that pool without this member."""
        return [
            other
            for other in self._registry
            if other is not member and other.is_ready and self._role_of(other) is role
        ]

    def _reported(self, member: Member) -> None:
        order = self._orders.get(member)
        if order is not None and order.role is member.role:
            del self._orders[member]
            self._metrics.role_changes.labels(role=member.role.name.lower()).inc()
            log.info("%s is a %s node", member.node_id, member.role.name.lower())
            order.was_seen = True
            order.is_over.set()

    def _lost(self, member: Member) -> None:
        order = self._orders.pop(member, None)
        if order is not None:
            order.is_over.set()


async def rebalance(decide: Callable[[], Turn | None], changes: RoleChanges, tick_s: float) -> None:
    """Turn nodes over as is decided at every tick, until cancelled.

    By the clock and not on events: what is decided rests on how long loads have lasted.
    """
    try:
        while True:
            await asyncio.sleep(tick_s)
            turn = decide()
            if turn is None:
                continue
            try:
                changes.order(turn.node_id, turn.role)
            except (NodeNotFound, RoleRefused) as error:
                log.warning("rebalancing: %s", error)
    except Exception:
        log.exception("rebalancing has ended")  # nobody waits for it who would hear of it
        raise
