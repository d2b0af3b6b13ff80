"""How long it takes until a pool has one node more, learned from the starts that were seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from coordinator.nodes.registry import Member, Registry
from coordinator.pools.role_changes import RoleChanges
from coordinator.pools.wake_times import WakeTimes
from pdserve.protocol import NodeRole, NodeState
from pdserve.shared.clock import Clock

FIRST_S: Final = 30.0  # as long as no start was seen
MOST_S: Final = 600.0
_ANY: Final = ""


class Starts:
    """The starts of one coordinator's members: from their first word until they can work.

    A node that wakes as another model's has not started: that takes a running process less.
    """

    def __init__(
        self,
        registry: Registry,
        changes: RoleChanges,
        clock: Clock,
        desired: Callable[[], Mapping[NodeRole, int]],
        *,
        flips: bool,
    ) -> None:
        """`desired`, `flips`: as `StandbyNodes` has them."""
        self._registry = registry
        self._changes = changes
        self._clock = clock
        self._desired = desired
        self._flips = flips
        self._times = WakeTimes(MOST_S, FIRST_S)
        self._began_s: dict[Member, float] = {}  # by those that load
        registry.on_changed(self._changed)
        registry.on_lost(self._lost)

    def until_next_s(self, role: NodeRole) -> float:
        """Return the seconds until a pool's next node would work.

        They are none with a node on standby, or one that the other pool has to spare.
        """
        may_become, others = self._changes.may_become, self._desired().get(role.other)
        if any(member.is_standby and may_become(member, role) for member in self._registry):
            return 0.0
        if self._flips and others is not None and others < self._changes.num_serving(role.other):
            return 0.0
        return self._times.expected_s(_ANY)

    def _lost(self, member: Member) -> None:
        self._began_s.pop(member, None)

    def _changed(self, member: Member) -> None:
        has_loaded = member.is_ready or member.is_standby
        is_start = not member.hello.has_woken
        if is_start and member.load.state is NodeState.LOADING and not has_loaded:
            self._began_s.setdefault(member, self._clock.now())
        elif has_loaded and member in self._began_s:
            self._times.learn(_ANY, self._clock.now() - self._began_s.pop(member))
