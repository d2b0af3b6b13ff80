"""How long starts take is learned from starts."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.nodes.registry import Registry
from coordinator.pools.role_changes import RoleChanges
from coordinator.pools.starts import FIRST_S, Starts
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole, NodeState
from pdserve.shared.clock import ManualClock
from tests.fakes.members import join, report

D = NodeRole.DECODE


def test_a_wake_is_no_start() -> None:
    registry, clock = Registry(), ManualClock()
    desired: Mapping[NodeRole, int] = {}
    changes = RoleChanges(registry, "colocated", CoordinatorMetrics())
    starts = Starts(registry, changes, clock, lambda: desired, flips=False)

    def ready_after(seconds: float, *, has_woken: bool) -> None:
        node = join(registry, "d0", D, state=NodeState.LOADING, has_woken=has_woken)
        clock.advance(seconds)
        report(registry, node, D, state=NodeState.READY)
        registry.remove(node)

    ready_after(0.3, has_woken=True)
    assert starts.until_next_s(D) == FIRST_S
    ready_after(9.0, has_woken=False)
    ready_after(0.3, has_woken=True)
    assert starts.until_next_s(D) == 9.0
