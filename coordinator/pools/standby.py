"""Gives nodes on standby to pools that lack nodes.

Such a node has its weights and its profile, so it serves as soon as it is told to. A flip is
cheaper still, and the rebalancer's, if there is one: where one pool has nodes to spare, the other
waits for that, unless it has none at all. Pools lack nodes when more are desired, and when one is
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from coordinator.nodes.registry import Member, Registry
from coordinator.pools.role_changes import RoleChanges
from pdserve.protocol import NodeRole, NodeState


class StandbyNodes:
    """The members of one coordinator that are on standby."""

    def __init__(
        self,
        registry: Registry,
        changes: RoleChanges,
        desired: Callable[[], Mapping[NodeRole, int]],
        decides: Callable[[], bool],
        *,
        flips: bool,
    ) -> None:
        """
        Args:
            registry: the members.
            changes: has them change.
            desired: the number of nodes that each pool should have; empty: not known yet.
            decides: whether this coordinator is the one that does so.
            flips: whether nodes that one pool can spare move to the other by themselves.
        """
        self._changes = changes
        self._desired = desired
        self._decides = decides
        self._flips = flips
        self._members: dict[Member, None] = {}  # on standby, in the order in which they came
        self._registry = registry
        registry.on_changed(self._changed)
        registry.on_lost(self._lost)

    def look(self) -> None:
        """Give pools what they lack, as far as there is any."""
        free = [member for member in self._members if self._changes.is_free(member)]
        if not free or not self._decides():
            return
        desired = self._desired()
        serving = {role: self._changes.num_serving(role) for role in desired}
        while (choice := self._choose(free, desired, serving)) is not None:
            member, role = choice
            free.remove(member)
            self._changes.order(member.node_id, role)
            serving[role] += 1

    def _choose(
        self,
        free: Sequence[Member],
        desired: Mapping[NodeRole, int],
        serving: Mapping[NodeRole, int],
    ) -> tuple[Member, NodeRole] | None:
        """Return the next node to begin, and where."""
        may_become = self._changes.may_become
        return next(
            (
                (member, role)
                for role in self._in_need(desired, serving)
                for member in free
                if may_become(member, role)
            ),
            None,
        )

    def _in_need(
        self, desired: Mapping[NodeRole, int], serving: Mapping[NodeRole, int]
    ) -> list[NodeRole]:
        """Return the pools that lack nodes which no flip would give them, the neediest first."""
        lacking = {role: number - serving[role] for role, number in desired.items()}
        no_flip = not self._flips or sum(lacking.values()) > 0
        short = [role for role in lacking if lacking[role] > 0 and (no_flip or not serving[role])]
        return sorted(short, key=lambda role: (serving[role] > 0, -lacking[role]))

    def _changed(self, member: Member) -> None:
        if member.is_standby:
            self._members[member] = None
        else:
            self._members.pop(member, None)
            if member.load.state in (NodeState.DRAINING, NodeState.SICK):
                self.look()

    def _lost(self, member: Member) -> None:
        self._members.pop(member, None)
        self.look()
