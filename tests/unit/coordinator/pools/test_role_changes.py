"""Orders to change pools: who gets them, who is spared them, and when they are carried out."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import get_args

import pytest

from coordinator.main import run
from coordinator.nodes.registry import Registry
from coordinator.pools.desired import DesiredNodes, PoolDemand
from coordinator.pools.drains import Drains
from coordinator.pools.rebalancer import Turn
from coordinator.pools.role_changes import RoleChanges, carry_out
from coordinator.routing import Router
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import NodeRole, NodeState, SetRole
from pdserve.settings.config import CoordinatorConfig, Mode, RoutingConfig
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ConfigError, DeadlineExceeded, NodeLost, NodeNotFound, RoleRefused
from tests.fakes.members import join, report, said_to

P, D = NodeRole.PREFILL, NodeRole.DECODE


class Bench:
    def __init__(self, mode: Mode = "disaggregated") -> None:
        self.registry = Registry()
        self.metrics = CoordinatorMetrics()
        self.changes = RoleChanges(self.registry, mode, self.metrics)
        self.p0 = join(self.registry, "p0", P)
        self.d0 = join(self.registry, "d0", D)
        self.d1 = join(self.registry, "d1", D)

    def num_changes(self, role: str) -> float:
        value = self.metrics.registry.get_sample_value("pdserve_role_changes_total", {"role": role})
        return value or 0.0


async def test_a_change_is_over_when_the_node_reports_it() -> None:
    bench = Bench()
    change = asyncio.create_task(bench.changes.change("d0", P, within_s=5))
    await asyncio.sleep(0)
    assert said_to(bench.d0) == [SetRole(role=P)]
    report(bench.registry, bench.d0, D)  # sent before it was told
    await asyncio.sleep(0)
    assert not change.done()
    report(bench.registry, bench.d0, P)
    assert await change is True
    assert bench.num_changes("prefill") == 1


async def test_who_has_the_role_is_left_alone() -> None:
    bench = Bench()
    assert await bench.changes.change("d0", D, within_s=5) is False
    assert said_to(bench.d0) == []


async def test_an_unknown_node_is_answered_with_those_there_are() -> None:
    with pytest.raises(NodeNotFound, match=r'no node "x"; attached: d0, d1, p0') as info:
        await Bench().changes.change("x", P, within_s=5)
    assert info.value.param == "node"


@pytest.mark.parametrize("role", NodeRole)
@pytest.mark.parametrize("mode", get_args(Mode))
async def test_a_pool_that_the_mode_needs_is_not_emptied(mode: Mode, role: NodeRole) -> None:
    bench = Bench(mode)
    last, others = (bench.p0, []) if role is P else (bench.d0, [bench.d1])
    router = Router(bench.registry, mode)
    for member in (last, *others):
        report(bench.registry, member, role.other)
    needs_one = not router.can_route()
    report(bench.registry, last, role)
    if needs_one:
        with pytest.raises(RoleRefused, match=f"the only ready {role.name.lower()} node"):
            bench.changes.order(last.node_id, role.other)
    else:
        bench.changes.order(last.node_id, role.other)
    assert said_to(last) == ([] if needs_one else [SetRole(role=role.other)])


async def test_two_orders_together_empty_no_pool_either() -> None:
    bench = Bench()
    bench.changes.order("d0", P)
    with pytest.raises(RoleRefused, match="the only ready decode node"):
        bench.changes.order("d1", P)  # although d0 still reports that it decodes


async def test_nor_do_an_order_and_a_drain() -> None:
    for drained_first in (True, False):
        bench = Bench()
        drains = Drains(bench.changes)
        (drains.order if drained_first else partial(bench.changes.order, role=P))("d0")
        for order in (partial(bench.changes.order, role=P), drains.order):
            with pytest.raises(RoleRefused, match="d1 is the only ready decode node"):
                order("d1")
        if drained_first:
            with pytest.raises(RoleRefused, match="d0 is draining"):
                bench.changes.order("d0", P)


async def test_force_lets_the_last_node_leave_its_pool() -> None:
    bench = Bench()
    change = asyncio.create_task(bench.changes.change("p0", D, force=True, within_s=5))
    await asyncio.sleep(0)
    report(bench.registry, bench.p0, D)
    assert await change is True


async def test_a_node_whose_memory_nobody_can_read_cannot_prefill_for_others() -> None:
    bench = Bench()
    join(bench.registry, "d2", D, prefill_refusal="its memory is private")
    with pytest.raises(RoleRefused, match="d2 cannot become a prefill node: its memory is private"):
        await bench.changes.change("d2", P, force=True, within_s=5)


async def test_a_draining_node_is_let_go() -> None:
    bench = Bench()
    report(bench.registry, bench.d0, D, state=NodeState.DRAINING)
    with pytest.raises(RoleRefused, match="d0 is draining"):
        bench.changes.order("d0", P)


async def test_a_node_that_says_nothing() -> None:
    bench = Bench()
    with pytest.raises(DeadlineExceeded, match="d0 has not reported its new role"):
        await bench.changes.change("d0", P, within_s=0.01)


async def test_a_node_that_goes_away_meanwhile() -> None:
    bench = Bench()
    change = asyncio.create_task(bench.changes.change("d0", P, within_s=5))
    await asyncio.sleep(0)
    bench.registry.remove(bench.d0)
    with pytest.raises(NodeLost, match="d0 is gone"):
        await change


async def test_two_who_want_the_same_wait_for_the_same() -> None:
    bench = Bench()
    changes = [asyncio.create_task(bench.changes.change("d0", P, within_s=5)) for _ in range(2)]
    await asyncio.sleep(0)
    report(bench.registry, bench.d0, P)
    assert await asyncio.gather(*changes) == [True, True]
    assert said_to(bench.d0) == [SetRole(role=P)]


async def test_an_order_is_taken_back_before_it_was_carried_out() -> None:
    bench = Bench()
    first = asyncio.create_task(bench.changes.change("d0", P, within_s=5))
    await asyncio.sleep(0)
    back = asyncio.create_task(bench.changes.change("d0", D, within_s=5))
    await asyncio.sleep(0)
    assert said_to(bench.d0) == [SetRole(role=P), SetRole(role=D)]
    report(bench.registry, bench.d0, P)
    report(bench.registry, bench.d0, D)
    assert await back is True
    with pytest.raises(RoleRefused, match="was given another role"):
        await first


def test_only_a_turn_that_is_made_moves_what_is_desired(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    desired = DesiredNodes(ManualClock())
    desired.tick({P: PoolDemand(1, 0, lambda n: 0.0), D: PoolDemand(2, 0, lambda n: 0.0)})
    for refused in (Turn("gone", P), Turn("p0", D)):
        carry_out(refused, bench.changes, desired)
    assert said_to(bench.p0) == []
    assert caplog.text.count("rebalancing:") == 2
    assert desired.numbers == {P: 1, D: 2}
    carry_out(Turn("d1", P), bench.changes, desired)
    assert said_to(bench.d1) == [SetRole(role=P)]
    assert desired.numbers == {P: 2, D: 1}


def test_one_pool_cannot_be_rebalanced() -> None:
    config = CoordinatorConfig(mode="colocated", routing=RoutingConfig(rebalance=True))
    with pytest.raises(ConfigError, match="--rebalance needs two pools"):
        run(config)
