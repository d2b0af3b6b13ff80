"""When nodes change pools: never the last one, never in haste, and not to and fro."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.pools.rebalancer import (
    COOLDOWN_S,
    DWELL_S,
    LATE,
    SPARE,
    SUSTAINED_TICKS,
    NodeLoad,
    Rebalancer,
    Turn,
    pool_load,
)
from pdserve.protocol import NodeRole
from pdserve.shared.clock import ManualClock
from tests.matrix import examples

P, D = NodeRole.PREFILL, NodeRole.DECODE
TICK_S = 0.5
FEW = 0.1  # a load that leaves time to spare
HIGH = 1.5 * LATE


class Pools:
    """Nodes that do as they are told at once, with loads that a test sets."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        names = [f"p{n}" for n in range(num_prefill)] + [f"d{n}" for n in range(num_decode)]
        self.roles = dict(zip(names, [P] * num_prefill + [D] * num_decode, strict=True))
        self.loads: dict[NodeRole, float | None] = {P: FEW, D: FEW}
        self.left_over: dict[str, int] = {}
        self.fixed: set[str] = set()
        self.desired: dict[NodeRole, int] = {}
        self.clock = ManualClock()
        self.rebalancer = Rebalancer(self.clock)
        self.turns: list[tuple[float, Turn]] = []

    def tick(self, times: int = 1) -> Turn | None:
        """So many looks; what followed from the last of them."""
        turn = None
        for _ in range(times):
            turn = self.rebalancer.tick(
                [
                    NodeLoad(
                        name,
                        role,
                        self.loads[role],
                        self.left_over.get(name, 0),
                        name not in self.fixed,
                    )
                    for name, role in self.roles.items()
                ],
                self.desired,
            )
            if turn is not None:
                self.turns.append((self.clock.now(), turn))
                self.roles[turn.node_id] = turn.role
            self.clock.advance(TICK_S)
        return turn

    def settle(self) -> None:
        """Until every node has dwelt where it is."""
        loads, self.loads = self.loads, {P: FEW, D: FEW}
        self.tick(int(DWELL_S / TICK_S) + 1)
        self.loads = loads

    def count(self, role: NodeRole) -> int:
        return sum(r is role for r in self.roles.values())


def settled(num_prefill: int = 2, num_decode: int = 2) -> Pools:
    pools = Pools(num_prefill, num_decode)
    pools.settle()
    return pools


@pytest.mark.parametrize("role", [P, D])
def test_a_late_pool_gets_a_node_of_one_with_time_to_spare(role: NodeRole) -> None:
    pools = settled()
    pools.loads[role] = HIGH
    assert pools.tick(SUSTAINED_TICKS - 1) is None
    turn = pools.tick()
    assert turn is not None
    assert turn.role is role
    assert pools.count(role) == 3


@pytest.mark.parametrize(("desired", "turns"), [((6, 8), 0), ((3, 8), 1), ((2, 2), 1)])
def test_a_pool_that_will_soon_need_more_itself_gives_nobody_away(
    desired: tuple[int, int], turns: int
) -> None:
    """It has time to spare now, but load rises."""
    pools = settled(2, 4)
    pools.loads[D] = HIGH
    pools.desired = dict(zip((P, D), desired, strict=True))
    pools.tick(SUSTAINED_TICKS)
    assert len(pools.turns) == turns


def test_a_burst_moves_nobody() -> None:
    pools = settled()
    for _ in range(50):
        pools.loads[P] = HIGH
        assert pools.tick(SUSTAINED_TICKS - 1) is None
        pools.loads[P] = FEW
        assert pools.tick() is None


def test_pools_that_are_late_by_turns_keep_their_nodes() -> None:
    pools = settled(3, 3)
    for tick in range(200):
        pools.loads = {P: HIGH, D: FEW} if tick % 2 else {P: FEW, D: HIGH}
        pools.tick()
    assert pools.turns == []


def test_nothing_is_gained_when_both_are_late() -> None:
    pools = settled()
    pools.loads = {P: HIGH, D: HIGH}
    pools.tick(100)
    assert pools.turns == []


def test_nothing_is_gained_when_both_are_late_by_turns_for_seconds_each() -> None:
    """As where both refuse requests: a pool is late while it does, and idle until the next one."""
    pools = settled(4, 4)
    for second in range(240):
        late = P if second // 5 % 2 else D
        pools.loads = {late: HIGH, late.other: FEW}
        pools.tick(int(1 / TICK_S))
    assert len(pools.turns) == 1, "before the second one was late"
    pools.loads = {P: HIGH, D: FEW}
    pools.tick(int(DWELL_S / TICK_S) + SUSTAINED_TICKS)
    assert len(pools.turns) == 2, "it stays late, and the other one idle"


def test_a_pool_that_would_be_short_itself_gives_nobody_away() -> None:
    pools = settled()
    pools.loads = {P: HIGH, D: SPARE / 2 + 0.01}  # of two nodes; more than SPARE for one
    pools.tick(100)
    assert pools.turns == []
    pools.loads[D] = SPARE / 2 - 0.01
    pools.tick(SUSTAINED_TICKS)
    assert len(pools.turns) == 1


def test_the_last_node_of_a_pool_stays() -> None:
    pools = settled(2, 1)
    pools.loads = {P: HIGH, D: 0.0}
    pools.tick(100)
    assert pools.turns == []


def test_a_pool_that_has_lost_its_last_node_gets_one() -> None:
    pools = settled(1, 2)
    del pools.roles["p0"]
    pools.loads[D] = SPARE
    assert pools.tick(SUSTAINED_TICKS) == Turn("d0", P)


def test_a_pool_whose_nodes_are_loading_is_waited_for() -> None:
    pools = settled(1, 2)
    pools.loads[P] = None
    pools.tick(100)
    assert pools.turns == []


def test_who_has_least_to_finish_goes() -> None:
    pools = settled(1, 3)
    pools.left_over = {"d0": 7, "d1": 2, "d2": 5}
    pools.loads[P] = HIGH
    pools.tick(SUSTAINED_TICKS)
    assert [turn for _, turn in pools.turns] == [Turn("d1", P)]


def test_who_cannot_work_there_stays() -> None:
    pools = settled(1, 3)
    pools.fixed = {"d0", "d1"}
    pools.loads[P] = HIGH
    pools.tick(SUSTAINED_TICKS)
    assert [turn for _, turn in pools.turns] == [Turn("d2", P)]


def test_a_turn_is_given_time_to_show() -> None:
    pools = settled(1, 5)
    pools.loads[P] = HIGH
    pools.tick(SUSTAINED_TICKS + int(COOLDOWN_S / TICK_S) - 1)
    assert len(pools.turns) == 1
    pools.tick()
    assert len(pools.turns) == 2


def test_a_node_stays_where_an_operator_has_put_it() -> None:
    pools = settled(2, 2)
    pools.roles["p1"] = D  # by hand
    pools.loads = {P: HIGH, D: FEW}
    pools.tick(SUSTAINED_TICKS)
    assert [turn.node_id for _, turn in pools.turns] == ["d0"]
    pools.left_over = {"d1": 9}
    pools.tick(int((DWELL_S - 2 * SUSTAINED_TICKS * TICK_S) / TICK_S))
    assert "p1" not in [turn.node_id for _, turn in pools.turns]


Demand = Callable[[float], dict[NodeRole, float]]


def serve(pools: Pools, demand: Demand, seconds: float) -> None:
    """A closed loop: a pool's load is what is asked of it, shared by its nodes."""
    for _ in range(int(seconds / TICK_S)):
        asked = demand(pools.clock.now())
        pools.loads = {role: asked[role] / max(pools.count(role), 1) for role in NodeRole}
        pools.tick()


@pytest.mark.long
@given(
    sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    asked=st.tuples(st.floats(0, 10), st.floats(0, 10)),
)
@settings(max_examples=examples(60))
def test_under_a_steady_load_nodes_come_to_rest(
    sizes: tuple[int, int], asked: tuple[float, float]
) -> None:
    pools = settled(*sizes)
    serve(pools, lambda _: dict(zip((P, D), asked, strict=True)), 300.0)
    assert len({turn.role for _, turn in pools.turns}) <= 1, "to and fro"
    assert all(
        turn.node_id not in [t.node_id for _, t in pools.turns[:i]]
        for i, (_, turn) in enumerate(pools.turns)
    )


@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    phases=st.lists(
        st.tuples(st.integers(1, 120), st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=12
    ),
)
@settings(max_examples=examples(60))
def test_whatever_the_load_does_the_guards_hold(
    sizes: tuple[int, int], phases: list[tuple[int, float, float]]
) -> None:
    pools = Pools(*sizes)
    for num_ticks, prefill, decode in phases:
        pools.loads = {P: prefill, D: decode}
        for _ in range(num_ticks):
            pools.tick()
            assert pools.count(P) >= 1
            assert pools.count(D) >= 1
    times = [at_s for at_s, _ in pools.turns]
    assert all(b - a >= COOLDOWN_S for a, b in pairwise(times))
    last: dict[str, float] = dict.fromkeys(pools.roles, 0.0)
    for at_s, turn in pools.turns:
        assert at_s - last[turn.node_id] >= DWELL_S
        last[turn.node_id] = at_s


def test_a_load_that_swings_slowly_is_followed_and_no_faster_than_nodes_may_dwell() -> None:
    pools = settled(3, 3)
    phase_s, start_s = 120.0, pools.clock.now()

    def demand(now_s: float) -> dict[NodeRole, float]:
        is_first = int((now_s - start_s) / phase_s) % 2 == 0
        return {P: 3.6, D: 0.9} if is_first else {P: 0.9, D: 3.6}

    serve(pools, demand, 6 * phase_s)
    followed = [role for role, _ in groupby(turn.role for _, turn in pools.turns)]
    assert followed == [P, D, P, D, P, D], "once for each phase"


def test_the_load_of_a_pool() -> None:
    nodes = [NodeLoad("a", P, 0.5), NodeLoad("b", P, 1.5), NodeLoad("c", P, None)]
    assert pool_load(nodes, P) == 1.0
    assert pool_load(nodes, D) == inf
    assert pool_load(nodes[2:], P) is None
    assert P.other is D
    assert D.other is P
