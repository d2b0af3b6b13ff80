"""Which prefill nodes can hand requests off to which decode nodes: KV must be able to move.

The answers are kept until the ready nodes change, or pairs begin or cease to fail, which they
seldom do, so a decision only looks them up. Nodes with the same transports have the same partners,
except those whose handoffs fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final

from coordinator.generation import Needs
from coordinator.nodes.registry import KvReach, Member, Registry
from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.slots import Ints
from coordinator.routing.pairs.health import NOTHING, Avoided, PairHealth
from pdserve.protocol import NodeRole
from pdserve.shared.clock import Clock
from pdserve.shared.errors import NoNodeAvailable

log = logging.getLogger(__name__)

ALONE_S: Final = 5.0  # for which a node has no partner before that is worth a warning


class Pairs:
    """Ready nodes of the two pools that share a transport. Made after the fleet."""

    def __init__(self, registry: Registry, fleet: Fleet, health: PairHealth, clock: Clock) -> None:
        self._fleet = fleet
        self._health = health
        self._ready = fleet.ready(None)  # the nodes that the following is about
        self._avoided: Avoided = NOTHING  # as well
        # By whether they may be tried whose pause after a failure is over; by slot; by adapter.
        self._prefills: dict[tuple[bool, str], Ints] = {}
        self._decodes: dict[tuple[bool, int, str], Ints] = {}
        self._partners: dict[tuple[frozenset[KvReach], NodeRole, str], Ints] = {}
        self._clock = clock
        self._alone: dict[Member, tuple[NodeRole, float]] = {}  # in this pool; when to say so
        registry.on_changed(self._changed)
        registry.on_lost(self._lost)

    def prefills(self, *, tries: bool = True, adapter: str = "") -> Ints:
        """Return the prefill nodes that can hand requests off to some decode node.

        With `tries`, those too of whose failing pairs one is to be tried now. With an `adapter`,
        both nodes have it.
        """
        self._forget_if_changed()
        slots = self._prefills.get((tries, adapter))
        if slots is None:
            slots = self._with_any(partial(self._working, tries=tries, adapter=adapter), adapter)
            self._prefills[tries, adapter] = slots
        return slots

    def prefills_to_try(self, adapter: str = "") -> Ints:
        """Return the prefill nodes that share a transport with some decode node, and may fail."""
        self._forget_if_changed()
        return self._with_any(partial(self._sharing, adapter=adapter), adapter)

    def decodes(self, prefill: int, *, tries: bool = True, adapter: str = "") -> Ints:
        """Return the decode nodes that a prefill node can hand requests off to, as `prefills`.

        Where all of its handoffs fail, these are the ones to try.
        """
        self._forget_if_changed()
        slots = self._decodes.get((tries, prefill, adapter))
        if slots is None:
            slots = self._working(prefill, tries=tries, adapter=adapter)
            if len(slots) == 0:
                slots = self._sharing(prefill, adapter)
            self._decodes[tries, prefill, adapter] = slots
        return slots

    def is_alone(self, member: Member) -> bool:
        """Return whether the other pool has ready nodes, none of which shares a transport."""
        self._forget_if_changed()
        other = member.role.other
        return len(self._fleet.ready(other)) > 0 and len(self._partners_of(member, other)) == 0

    def obstacle(self) -> NoNodeAvailable:
        """Return why there is no pair, although both pools have ready nodes."""
        pools = [f"{role.name.lower()} nodes have {self._offer(role)}" for role in NodeRole]
        return NoNodeAvailable(
            f"no prefill node shares a KV transport with a decode node: {', '.join(pools)}; start "
            "both pools with a common one (transports), or the coordinator with --mode adaptive, "
            "where one node can serve a request"
        )

    def _with_any(self, partners: Callable[[int], Ints], adapter: str) -> Ints:
        ready = self._fleet.ready(NodeRole.PREFILL, Needs(adapter=adapter))
        has_partner = [len(partners(slot)) > 0 for slot in ready.tolist()]
        return ready if all(has_partner) else ready[has_partner]

    def _sharing(self, prefill: int, adapter: str) -> Ints:
        return self._partners_of(self._fleet.member(prefill), NodeRole.DECODE, adapter)

    def _working(self, prefill: int, *, tries: bool, adapter: str) -> Ints:
        slots, avoided = self._sharing(prefill, adapter), self._avoided
        if avoided is NOTHING:
            return slots
        member, fleet = self._fleet.member(prefill), self._fleet
        works = [avoided.allows(member, fleet.member(slot), tries=tries) for slot in slots.tolist()]
        return slots if all(works) else slots[works]

    def _partners_of(self, member: Member, role: NodeRole, adapter: str = "") -> Ints:
        """Return the ready nodes of a pool that share a transport with a node."""
        key = (member.reaches, role, adapter)
        slots = self._partners.get(key)
        if slots is None:
            ready = self._fleet.ready(role, Needs(adapter=adapter))
            shares = [self._fleet.member(s).exchanges_kv(member) for s in ready.tolist()]
            slots = self._partners[key] = ready if all(shares) else ready[shares]
        return slots

    def _forget_if_changed(self) -> None:
        ready, avoided = self._fleet.ready(None), self._health.avoided()
        if ready is not self._ready:  # a new array on any change of either pool
            self._ready, self._partners = ready, {}
        elif avoided == self._avoided:
            return
        self._avoided, self._prefills, self._decodes = avoided, {}, {}

    def _offer(self, role: NodeRole) -> str:
        members = [self._fleet.member(slot) for slot in self._fleet.ready(role).tolist()]
        reaches = sorted({(r.name, r.domain != "") for m in members for _, r in m.reaches})
        names = [f"{name} (within a host)" if is_local else name for name, is_local in reaches]
        return " and ".join(names) or "none"

    def _changed(self, member: Member) -> None:
        """Log once that a node cannot take part in any handoff, if it stays so for a while.

        Nodes that start together are ready one after the other.
        """
        if not member.is_ready or not self.is_alone(member):
            self._alone.pop(member, None)
            return
        now_s = self._clock.now()
        role, due_s = self._alone.setdefault(member, (member.role, now_s + ALONE_S))
        if role is not member.role:
            self._alone[member] = member.role, now_s + ALONE_S
        elif due_s <= now_s:
            self._alone[member] = role, inf
            log.warning(
                "%s shares no KV transport with any %s node: it has %s",
                member.node_id,
                member.role.other.name.lower(),
                " and ".join(reach.name for reach in member.hello.transports) or "none",
            )

    def _lost(self, member: Member) -> None:
        self._alone.pop(member, None)
