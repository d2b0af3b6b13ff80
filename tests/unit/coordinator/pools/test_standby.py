"""Nodes on standby: they begin when a pool lacks one, and count for none until then."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.nodes.registry import Member, Registry
from coordinator.pools.desired import DesiredNodes, PoolDemand
from coordinator.pools.loads import PoolLoads
from coordinator.pools.role_changes import RoleChanges
from coordinator.pools.standby import StandbyNodes
from coordinator.routing.router import NodeOutlook
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole, NodeState, SetRole
from pdserve.settings.config import Mode
from pdserve.shared.clock import ManualClock
from tests.fakes.members import join, report, said_to
from tests.unit.coordinator.pools.test_loads import Promises

P, D = NodeRole.PREFILL, NodeRole.DECODE


class Bench:
    def __init__(self, mode: Mode = "disaggregated", *, flips: bool = True, **desired: int) -> None:
        self.registry = Registry()
        self.changes = RoleChanges(self.registry, mode, CoordinatorMetrics())
        self.desired = {P: desired.get("prefill", 1), D: desired.get("decode", 1)}
        self.decides = True
        self.standby = StandbyNodes(
            self.registry, self.changes, lambda: self.desired, lambda: self.decides, flips=flips
        )
        self.p = join(self.registry, "p", P)
        self.d = join(self.registry, "d", D)

    def wait(self, node_id: str, role: NodeRole = D, **hello: object) -> Member:
        """A node joins, has loaded, and waits."""
        member = join(self.registry, node_id, role, state=NodeState.LOADING, **hello)
        report(self.registry, member, role, state=NodeState.LOADING, is_standby=True)
        return member


def told(member: Member) -> list[NodeRole]:
    return [message.role for message in said_to(member) if isinstance(message, SetRole)]


def test_it_waits_while_no_pool_lacks_a_node() -> None:
    bench = Bench()
    waiting = bench.wait("w")
    bench.standby.look()
    assert told(waiting) == []
    assert not waiting.is_ready


@pytest.mark.parametrize("role", NodeRole)
@pytest.mark.parametrize("own", NodeRole)
def test_the_pool_that_lacks_one_gets_it_once_whatever_it_was_started_as(
    role: NodeRole, own: NodeRole
) -> None:
    bench = Bench()
    waiting = bench.wait("w", own)
    bench.desired[role] = 2
    bench.standby.look()
    bench.standby.look()
    assert told(waiting) == [role]
    report(bench.registry, waiting, role)
    bench.standby.look()
    assert told(waiting) == [role]


def test_each_pool_gets_what_it_lacks_as_far_as_there_is_any() -> None:
    bench = Bench(prefill=3, decode=2)
    waiting = [bench.wait(name) for name in ("w0", "w1", "w2", "w3")]
    bench.standby.look()
    assert sorted(told(member) for member in waiting) == [[], [P], [P], [D]]


@pytest.mark.parametrize("flips", [True, False])
def test_a_node_that_the_other_pool_can_spare_is_waited_for_if_it_will_come(flips: bool) -> None:
    bench = Bench(decode=2, flips=flips)
    join(bench.registry, "p1", P)  # one more than is desired: a rebalancer moves it
    waiting = bench.wait("w")
    bench.standby.look()
    assert told(waiting) == ([] if flips else [D])


def test_one_that_is_lost_or_leaves_is_replaced_at_once() -> None:
    bench = Bench()
    first, second = bench.wait("w0"), bench.wait("w1")
    bench.registry.remove(bench.p)
    assert told(first) == [P]
    report(bench.registry, first, P)
    report(bench.registry, bench.d, D, state=NodeState.DRAINING)
    assert told(second) == [D]


def test_an_empty_pool_is_not_kept_waiting_for_a_flip() -> None:
    bench = Bench()
    join(bench.registry, "d1", D)
    waiting = bench.wait("w")
    bench.registry.remove(bench.p)
    assert told(waiting) == [P]


def test_only_one_coordinator_decides() -> None:
    bench = Bench(decode=2)
    bench.decides = False
    waiting = bench.wait("w")
    bench.standby.look()
    assert told(waiting) == []


def test_one_that_cannot_prefill_is_left_for_the_other_pool() -> None:
    bench = Bench(prefill=2)
    private, other = bench.wait("w0", prefill_refusal="private memory"), bench.wait("w1")
    bench.standby.look()
    assert (told(private), told(other)) == ([], [P])


async def test_an_operator_has_it_begin_in_its_own_role() -> None:
    bench = Bench()
    waiting = bench.wait("w", D)
    change = asyncio.create_task(bench.changes.change("w", D, within_s=5))
    await asyncio.sleep(0)
    assert told(waiting) == [D]
    report(bench.registry, waiting, D, state=NodeState.LOADING, is_standby=True)  # sent before
    await asyncio.sleep(0)
    assert not change.done()
    report(bench.registry, waiting, D)
    assert await change is True


async def test_one_that_loads_is_told_of_its_own_role_too_lest_it_wait() -> None:
    bench = Bench()
    loads = join(bench.registry, "w", D, state=NodeState.LOADING)
    changes = [asyncio.create_task(bench.changes.change("w", D, within_s=5)) for _ in range(2)]
    await asyncio.sleep(0)
    assert told(loads) == [D], "once: its reports do not tell what it will do"
    report(bench.registry, loads, D, state=NodeState.LOADING)
    assert await asyncio.gather(*changes) == [True, True]
    report(bench.registry, loads, D)
    assert await bench.changes.change("w", D, within_s=5) is False
    assert told(loads) == [D]


async def test_the_only_one_that_loads_is_told_so_too() -> None:
    bench = Bench()
    bench.registry.remove(bench.d)
    loads = join(bench.registry, "w", D, state=NodeState.LOADING)
    bench.changes.order("w", D)
    assert told(loads) == [D], "it leaves no pool"


def test_it_is_no_reason_to_keep_nodes_nor_one_to_count() -> None:
    bench = Bench()
    bench.wait("w")
    loads = PoolLoads(
        bench.registry, Promises(), lambda member: NodeOutlook(0.0, 0.0, 1.0), ManualClock()
    )
    demand = loads.demands([D])[D]
    assert (demand.ready, demand.others) == (0, 1), "d, which has not told its profile"


def test_a_flip_moves_what_is_desired() -> None:
    policy = DesiredNodes(ManualClock())
    policy.tick({P: PoolDemand(3, 0, lambda n: 0.3), D: PoolDemand(1, 0, lambda n: 0.3)})
    policy.turned(D)
    assert policy.numbers == {P: 2, D: 2}
    policy.turned(D)  # of the same node, as far as reports tell
    assert policy.numbers == {P: 2, D: 2}
