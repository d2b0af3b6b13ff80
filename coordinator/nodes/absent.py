"""Nodes that a coordinator misses: those that were lost, and those that it does not let in.

Whoever looks at a cluster sees its members. What went wrong is often about the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

from coordinator.nodes.registry import Member, Registry
from pdserve.protocol import NodeRole, NodeState
from pdserve.protocol.status import Absence, AbsentNode

MOST: Final = 64
MOST_REASON: Final = 500  # characters
# How long a node is missed, unless it comes back: one that is refused tries again sooner than that.
KEPT_S: Final[Mapping[Absence, float]] = {"lost": 3600.0, "refused": 30.0}


class Absent:
    """Remembers them. A node that drains is not missed."""

    def __init__(self, registry: Registry, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._noted: dict[tuple[Absence, str], tuple[float, str]] = {}  # (when, why), oldest first
        self._roles: dict[str, NodeRole] = {}  # of those that were lost
        self._models: dict[str, str] = {}  # as which they were ready
        registry.on_joined(lambda member: self.forget(member.node_id))
        registry.on_lost(self._note_lost)
        registry.on_refused(lambda node_id, reason: self._note("refused", node_id, reason))

    def nodes(self) -> list[AbsentNode]:
        """Return them, those first that have been missed for longest."""
        now_s = self._now()
        return [
            AbsentNode(
                node_id=node_id,
                absence=absence,
                reason=reason,
                since_s=now_s - at_s,
                model=self._models.get(node_id, ""),
            )
            for (absence, node_id), (at_s, reason) in self._noted.items()
            if now_s - at_s < KEPT_S[absence]
        ]

    def misses(self, role: NodeRole) -> bool:
        """Return whether a node of this pool was lost, and is not back."""
        return any(
            node.absence == "lost" and self._roles.get(node.node_id) is role
            for node in self.nodes()
        )

    def forget(self, node_id: str) -> None:
        """It is back, perhaps as a node of another model."""
        for absence in KEPT_S:
            self._noted.pop((absence, node_id), None)
        self._lost_no_longer(node_id)

    def _lost_no_longer(self, node_id: str) -> None:
        self._roles.pop(node_id, None)
        self._models.pop(node_id, None)

    def _note_lost(self, member: Member) -> None:
        if member.load.state is not NodeState.DRAINING:
            reason = member.load.reason or "its stream broke, or nothing was heard of it"
            self._note("lost", member.node_id, reason)
            self._roles[member.node_id] = member.role
            self._models[member.node_id] = member.hello.model_name if member.is_ready else ""

    def _note(self, absence: Absence, node_id: str, reason: str) -> None:
        self._noted.pop((absence, node_id), None)
        self._noted[absence, node_id] = self._now(), reason[:MOST_REASON]
        if len(self._noted) > MOST:
            oldest = absence, node_id = next(iter(self._noted))
            del self._noted[oldest]
            if absence == "lost":
                self._lost_no_longer(node_id)
