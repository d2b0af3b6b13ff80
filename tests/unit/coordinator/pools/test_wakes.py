"""Which node wakes as which model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import pytest

from coordinator.pools.wake_shares import LATELY_S
from coordinator.pools.wake_times import FIRST_WAKE_S, WakeTimes
from coordinator.pools.wakes import (
    AGE_S,
    BUSY_S,
    FOLLOW_S,
    KEPT,
    MOST_PAUSE_S,
    ORDER_S,
    PAUSE_S,
    AwakeNode,
    Coming,
    ModelNow,
    Waiting,
    Wake,
    Wakes,
    needed_pools,
)
from pdserve.protocol import NodeRole

P, D = NodeRole.PREFILL, NodeRole.DECODE
ALL = frozenset("abcdefgh")


def node(name: str, role: NodeRole = D, *, life: str = "1", busy: int = 0) -> AwakeNode:
    return AwakeNode(name, life, role, is_ready=True, num_requests=busy, may_become=ALL)


def loading(name: str) -> AwakeNode:
    return AwakeNode(name, "2", D, is_ready=False, num_requests=0, may_become=ALL)


def waits(number: int, waited_s: float = 0.0, within_s: float = 60.0, tenant: str = "") -> list:
    return [Waiting(tenant, waited_s, within_s)] * number


def model(
    name: str,
    nodes: Sequence[AwakeNode] = (),
    waiting: Sequence[Waiting] = (),
    least: Mapping[NodeRole, int] | None = None,
) -> ModelNow:
    return ModelNow(name, least or {}, nodes, waiting)


def known(*models: ModelNow, mode: str = "colocated") -> tuple[Wakes, float]:
    """A policy that has seen these nodes long enough ago that they may leave."""
    wakes = Wakes(needed_pools(mode))  # type: ignore[arg-type]
    assert wakes.decide(models, 0.0) == []
    return wakes, FIRST_WAKE_S


def test_a_model_without_nodes_gets_one_that_is_idle() -> None:
    nodes = [node("d0", busy=2), node("d1")]
    wakes, now_s = known(model("a", nodes), model("b"))
    asked = [model("a", nodes), model("b", waiting=waits(1))]
    assert wakes.decide(asked, now_s - 0.1) == []  # not awake for long enough
    assert wakes.again_s == now_s
    assert wakes.decide(asked, now_s) == [Wake("d1", "b")]
    assert wakes.again_s == math.inf
    assert wakes.decide(asked, now_s) == []  # one is coming
    assert wakes.num_ordered == {"b": 1}


def test_where_wakes_are_short_a_node_need_not_be_awake_for_long() -> None:
    nodes = [node("d0")]
    wakes, _ = known(model("a", nodes), model("b"))
    wakes.times.learn("b", 0.1)
    asked = [model("a", nodes), model("b", waiting=waits(1))]
    assert wakes.decide(asked, 0.99 * 0.1) == []
    assert wakes.decide(asked, 0.1) == [Wake("d0", "b")]


def test_a_wake_costs_requests_that_run() -> None:
    busy = [node("d0", busy=3)]
    wakes, now_s = known(model("a", busy), model("b"))
    assert wakes.decide([model("a", busy), model("b", waiting=waits(2))], now_s) == []
    late = waits(2, waited_s=60.0)  # each counts for two at its deadline
    assert wakes.decide([model("a", busy), model("b", waiting=late)], now_s) == [Wake("d0", "b")]


def test_lines_of_batches_take_no_node_from_who_may_come_back_soon() -> None:
    nodes = [node("d0")]
    wakes, now_s = known(model("a", nodes), model("b"))
    wakes.times.learn("a", 0.5)
    lines = model("b", waiting=[replace(one, is_urgent=False) for one in waits(30)])
    for ago_s, orders in ((0.0, []), (0.9 * KEPT * 0.5, []), (KEPT * 0.5, [Wake("d0", "b")])):
        asked = [replace(model("a", nodes), urgent_s=now_s - ago_s), lines]
        assert wakes.decide(asked, now_s) == orders


def test_lines_of_batches_keep_no_node_from_others() -> None:
    nodes = [node("d0", busy=8)]
    wakes, now_s = known(model("a", nodes), model("b"))
    for share, orders in ((0.5, []), (0.0, [Wake("d0", "b")])):
        of_a = replace(model("a", nodes), urgent_share=share, urgent_s=now_s if share else -inf)
        lines = [replace(one, is_urgent=False) for one in waits(9)]
        asked = [replace(of_a, waiting=lines), model("b", waiting=[*waits(1), *lines])]
        assert wakes.decide(asked, now_s) == orders


def test_no_request_waits_for_a_busy_model_for_ever() -> None:
    busy = [node("d0", busy=9)]
    wakes, now_s = known(model("a", busy), model("b"))
    for waited_s, orders in ((5 * AGE_S, []), (9 * AGE_S, [Wake("d0", "b")])):
        asked = [model("a", busy), model("b", waiting=waits(1, waited_s, within_s=600.0))]
        assert wakes.decide(asked, now_s) == orders


def test_the_last_node_of_a_model_is_missed_by_who_waits_for_it() -> None:
    nodes = [node("d0")]
    wakes, now_s = known(model("a", nodes), model("b"))
    both = [model("a", nodes, waits(3)), model("b", waiting=waits(2))]
    assert wakes.decide(both, now_s) == []


@pytest.mark.parametrize("waited_s", [(3.0, 5.0), (4.0, 4.0)])
def test_of_two_models_that_have_half_of_what_they_need_one_gives_way(
    waited_s: tuple[float, float],
) -> None:
    """However many wakes were made lately for the only tenant there is."""
    own = {"a": [node("p0", P)], "b": [node("d0", D)]}
    wakes, now_s = known(*(model(name, nodes) for name, nodes in own.items()), mode="disaggregated")
    for number in range(50):
        wakes._shares.made_for([""], str(number), 1.0, now_s)
    asked = [
        model(name, own[name], waits(2, waited))
        for name, waited in zip("ab", waited_s, strict=True)
    ]
    assert wakes.decide(asked, now_s) == [Wake("p0", "b")]


def test_of_two_nodes_that_are_called_away_at_once_the_second_is_the_last() -> None:
    nodes = [node("d0"), node("d1")]
    wakes, now_s = known(model("a", nodes), model("b"), model("c"))
    asked = [
        model("a", nodes, waits(5)),
        model("b", waiting=waits(3)),
        model("c", waiting=waits(2)),
    ]
    assert wakes.decide(asked, now_s) == [Wake("d0", "b")]


def test_never_below_what_a_model_has_for_itself() -> None:
    nodes = [node("d0"), node("d1")]
    wakes, now_s = known(model("a", nodes, least={D: 1}), model("b"), model("c"))
    asked = [
        model("a", nodes, least={D: 1}),
        model("b", waiting=waits(5)),
        model("c", waiting=waits(4)),
    ]
    assert wakes.decide(asked, now_s) == [Wake("d0", "b")]
    left = [model("a", nodes[1:], least={D: 1}), *asked[1:]]
    assert wakes.decide(left, now_s + 1.0) == []


def test_a_node_of_each_pool_that_the_mode_needs() -> None:
    nodes = [node("p0", P), node("d0", D)]
    wakes, now_s = known(model("a", nodes), model("b"), mode="disaggregated")
    asked = [model("a", nodes), model("b", waiting=waits(1))]
    assert wakes.decide(asked, now_s) == [Wake("p0", "b"), Wake("d0", "b")]
    wakes, now_s = known(model("a", nodes), model("b"), mode="adaptive")
    assert wakes.decide(asked, now_s) == [Wake("p0", "b")]  # one of either pool will do


def test_a_busy_model_gets_another_one_after_a_while() -> None:
    nodes, own = [node("d0")], [node("d1", busy=9)]
    wakes, now_s = known(model("a", nodes), model("b", own))
    for waited_s, orders in ((BUSY_S / 2, []), (BUSY_S, [Wake("d0", "b")])):
        asked = [model("a", nodes), model("b", own, waits(1, waited_s))]
        assert wakes.decide(asked, now_s) == orders
    coming = [model("a"), model("b", [*own, loading("d0")], waits(1, BUSY_S))]
    assert wakes.decide(coming, now_s + 1.0) == []


def test_tenants_take_turns_at_waking() -> None:
    nodes = [node("d0")]
    wakes, now_s = known(model("a", nodes), model("b"), model("c"))
    greedy, other = waits(3, tenant="greedy"), waits(2, tenant="other")
    asked = [model("a", nodes), model("b", waiting=greedy), model("c")]
    assert wakes.decide(asked, now_s) == [Wake("d0", "b")]
    as_b = [node("d0", life="2")]
    assert wakes.decide([model("a"), model("b", as_b), model("c")], now_s + 0.5) == []
    both = [model("a", (), greedy), model("b", as_b), model("c", (), other)]
    now_s += 0.5 + FIRST_WAKE_S
    assert wakes.decide(both, now_s) == [Wake("d0", "c")]  # 3/2 against 2


def test_who_is_woken_again_for_one_model_is_not_who_thrashes() -> None:
    """As often as another tenant has that model's node taken away."""
    nodes = [node("d0")]
    wakes, now_s = known(model("a"), model("b", nodes), model("c"))
    for tenant, names in (("victim", "a" * 90), ("greedy", "bc")):
        for name in names:
            wakes._shares.made_for([tenant], name, FIRST_WAKE_S, now_s)
    both = [
        model("a", (), waits(1, tenant="victim")),
        model("b", nodes),
        model("c", (), waits(1, tenant="greedy")),
    ]
    assert wakes.decide(both, now_s) == [Wake("d0", "a")]


def test_of_two_that_wait_the_one_that_is_quicker_to_wake_is_not_always_first() -> None:
    nodes = [node("d0")]
    wakes, _ = known(model("a", nodes), model("b"), model("c"))
    for name, took_s in (("a", 0.4), ("b", 0.45), ("c", 0.1)):
        wakes.times.learn(name, took_s)
    asked = [model("a", nodes), model("b", (), waits(9)), model("c", (), waits(1))]
    wake_s = wakes.times.expected_s("a")
    assert wakes.decide(asked, 0.99 * wake_s) == []
    assert wakes.decide(asked, wake_s) == [Wake("d0", "b")]


def test_what_a_wake_takes_is_learned() -> None:
    nodes = [node("d0")]
    wakes, now_s = known(model("a", nodes), model("b"))
    assert wakes.coming("b", now_s) == Coming(FIRST_WAKE_S, is_ordered=False)
    wakes.decide([model("a", nodes), model("b", waiting=waits(1))], now_s)
    wakes.decide([model("a"), model("b", [node("d0", life="2")])], now_s + 0.25)
    assert wakes.times.expected_s("b") == 0.25
    assert wakes.times.expected_s("a") == 0.25  # as others, before its first one


def test_each_model_has_times_of_its_own_within_which_most_wakes_are_over() -> None:
    times = WakeTimes(ORDER_S)
    for number in range(200):
        times.learn("even", 0.5)
        times.learn("uneven", 0.4 if number % 2 else 0.8)
    assert times.expected_s("even") == pytest.approx(0.5)
    assert 0.8 <= times.expected_s("uneven") < 1.1
    assert 0.5 < times.expected_s("new") < 1.1
    times.learn("stuck", 1e9)
    assert times.expected_s("stuck") == ORDER_S


def test_what_is_left_of_a_wake() -> None:
    nodes = [node("d0")]
    wakes, now_s = known(model("a", nodes), model("b"))
    wakes.decide([model("a", nodes), model("b", waiting=waits(1))], now_s)
    for for_s, left_s in ((0.25, 0.75), (1.0, 0.0), (3.0, 2.0), (28.0, 2.0), (31.0, 0.0)):
        assert wakes.coming("b", now_s + for_s) == Coming(left_s, is_ordered=True)


def test_a_wake_that_fails_is_tried_again_and_then_more_and_more_rarely() -> None:
    nodes, now_s = [node("d0")], 0.0
    wakes, now_s = known(model("a", nodes), model("b"))
    asked = [model("a", nodes), model("b", waiting=waits(1))]
    assert wakes.decide(asked, now_s) == [Wake("d0", "b")]
    nodes = [node("d0", life="2")]  # it was killed, and started again as what it was
    asked = [model("a", nodes), model("b", waiting=waits(1))]
    assert wakes.decide(asked, now_s + 1) == []
    now_s += 1 + FIRST_WAKE_S
    assert wakes.decide(asked, now_s) == [Wake("d0", "b")]
    for number in range(12):
        now_s += ORDER_S
        assert wakes.decide(asked, now_s) == []  # nothing has come of it
        pause_s = min(MOST_PAUSE_S, PAUSE_S * 2**number)
        assert wakes.decide(asked, now_s + 0.9 * pause_s) == []
        assert wakes.coming("b", now_s + 0.9 * pause_s) is None
        now_s += pause_s
        assert wakes.decide(asked, now_s) == [Wake("d0", "b")]


def test_a_model_as_which_nodes_do_not_wake_cannot_be_served_until_it_is_tried_again() -> None:
    nodes = [node("d0")]
    wakes, now_s = known(model("a", nodes), model("b"), model("c"))
    waiting = model("b", waiting=waits(1))
    # It refuses, dies, becomes what another coordinator has ordered, and refuses twice.
    ends = [("a", "b"), ("a", ""), ("c", ""), ("c", "b"), ("c", "b")]
    now_in = "a"
    for number, (name, refused) in enumerate(ends):
        now_s += MOST_PAUSE_S
        asked = [model(now_in, nodes), waiting]
        assert wakes.decide(asked, now_s) == [Wake("d0", "b")]
        nodes, now_in = [replace(node("d0", life=f"{number + 2}"), refused=refused)], name
        assert wakes.decide([model(now_in, nodes), waiting], now_s + 1.0) == []
        assert (wakes.refused_s("b", now_s + 1.5) > 0.0) == (number == 4)
        assert not wakes.refused_s("a", now_s + 1.5)
    assert wakes.refused_s("b", now_s + 1.0) == PAUSE_S * 2**3
    now_s += 1.0 + MOST_PAUSE_S
    assert not wakes.refused_s("b", now_s)
    assert wakes.decide([model("c", nodes), waiting], now_s) == [Wake("d0", "b")]
    wakes.decide([model("c"), model("b", [node("d0", life="9")])], now_s + 1.0)
    assert not wakes.refused_s("b", now_s + 1.0)


def test_who_waits_for_a_model_that_was_refused_for_an_hour_need_not_come_again() -> None:
    first, waiting = [node("d0")], model("b", waiting=waits(1))
    wakes, now_s = known(model("a", first), model("b"))
    refused_s = []
    for number in range(62):  # one a minute
        assert wakes.decide([model("a", first), waiting], now_s) == [Wake("d0", "b")]
        first = [replace(node("d0", life=f"{number + 2}"), refused="b")]
        assert wakes.decide([model("a", first), waiting], now_s) == []
        refused_s.append(wakes.refused_s("b", now_s))
        now_s += MOST_PAUSE_S
    pauses = [min(MOST_PAUSE_S, PAUSE_S * 2**n) for n in range(59)]
    assert refused_s == [0.0, *pauses, inf, inf]
    assert wakes.decide([model("a", first), waiting], now_s) == [Wake("d0", "b")]
    wakes.decide([model("a"), model("b", [node("d0", life="99")])], now_s + 1.0)
    assert not wakes.refused_s("b", now_s + 1.0)


def test_a_node_that_has_refused_is_asked_after_the_others() -> None:
    nodes = [node("d0"), node("d1", busy=1)]
    wakes, now_s = known(model("a", nodes), model("b"))
    waiting = model("b", waiting=waits(3))
    assert wakes.decide([model("a", nodes), waiting], now_s) == [Wake("d0", "b")]
    nodes[0] = replace(node("d0", life="2"), refused="b")
    assert wakes.decide([model("a", nodes), waiting], now_s + 0.1) == [Wake("d1", "b")]
    wakes, now_s = known(model("a", nodes[:1]), model("b"))
    assert wakes.decide([model("a", nodes[:1]), waiting], now_s) == [Wake("d0", "b")]
    nodes[0] = replace(node("d0", life="3"), refused="b")
    assert wakes.decide([model("a", nodes[:1]), waiting], now_s + 0.1) == []
    now_s += 0.1 + FIRST_WAKE_S
    assert wakes.decide([model("a", nodes[:1]), waiting], now_s) == [Wake("d0", "b")], "none else"


def test_where_a_place_lacks_memory_requests_go_to_another_node() -> None:
    places = [replace(node(f"d{n}"), place_of=host) for n, host in enumerate("xxy")]
    wakes, now_s = known(model("a", places[:1]), model("c", places[1:]), model("b"))
    waiting = model("b", waiting=waits(1))
    assert wakes.decide([model("a", places[:1]), model("c", places[1:]), waiting], now_s) == [
        Wake("d0", "b")
    ]
    lacking = replace(loading("d0"), place_of="x", lacks_memory=True)
    before_s = wakes.times.expected_s("b")
    for busy, orders in ((9, []), (0, [Wake("d2", "b")])):
        others = [places[1], replace(places[2], num_requests=busy)]
        asked = [model("a"), model("c", others), replace(waiting, nodes=[lacking])]
        assert wakes.decide(asked, now_s + 0.5) == orders, "not d1, of the same node"
        assert (wakes.coming("b", now_s + 0.5) is not None) == bool(orders)
    came = replace(node("d2", life="2"), place_of="y")
    served = [model("a"), model("c", places[1:2]), model("b", [lacking, came])]
    assert wakes.decide(served, now_s + ORDER_S) == []
    back = replace(node("d0", life="3"), place_of="x", refused="b")
    alone = [model("a", [back]), model("c", places[1:2]), model("b")]
    assert wakes.decide(alone, now_s + ORDER_S + 1.0) == []
    assert wakes._failed["b"].refused_by == {"x"}, "the order was good for as long as it told"
    assert wakes.times.expected_s("b") != before_s, "by the second"


def test_who_asks_for_all_in_turn_has_no_more_than_a_share_of_the_wakes() -> None:
    """One node, wakes of 0.5 s. Another tenant asks for its only model every 7 s."""
    wake_s, names, now_s = 0.5, "abcd", 0.0
    for share, every_s in ((1 / 2, inf), (1 / 4, 7.0)):  # of the time
        wakes, awake, ready_s, end_s = Wakes(needed_pools("colocated")), "a", now_s, now_s + 150.0
        asked, asked_s, next_s = "b", inf, now_s + every_s
        here, woken_s = node("d0", life="0"), list[float]()
        while (now_s := now_s + 0.1) < end_s:
            if now_s >= next_s:
                asked_s, next_s = min(asked_s, now_s), next_s + every_s
            if now_s >= ready_s:  # whoever asked for it is served
                asked = names[1 + names.index(asked) % 3] if asked == awake else asked
                asked_s = inf if awake == "a" else asked_s
            waiting = {asked: waits(1, tenant="all")}
            waiting |= {"a": waits(1, now_s - asked_s, tenant="one")} if asked_s < inf else {}
            nodes = {awake: [here]} if now_s >= ready_s else {}
            models = [model(name, nodes.get(name, []), waiting.get(name, [])) for name in names]
            for order in wakes.decide(models, now_s):
                woken_s += [now_s] if order.model != "a" else []
                here = replace(here, incarnation=f"{now_s}")
                awake, ready_s = order.model, now_s + wake_s
            assert asked_s == inf or now_s - asked_s < 4 * wake_s, "the other is served in time"
        most = max(sum(0.0 <= to_s - at_s < LATELY_S for to_s in woken_s) for at_s in woken_s)
        assert 0.8 * share * LATELY_S <= most * wake_s <= share * LATELY_S + 2 * wake_s, share


def test_who_gives_no_orders_learns_from_those_of_others() -> None:
    wakes, _ = known(model("a"), model("b"))
    node_of_a, before_s = [node("d0"), node("d1")], wakes.times.expected_s("b")
    wakes.watch([model("a", node_of_a), model("b")], 0.0)
    wakes.watch([model("a", [node("d1")]), model("b")], 1.0)  # d0 drains
    wakes.watch([model("a", [node("d1")]), model("b", [loading("d0")])], 2.0)
    assert wakes.times.expected_s("b") == before_s
    wakes.watch([model("a", [node("d1")]), model("b", [node("d0", life="2")])], 9.0)
    assert wakes.times.expected_s("b") == pytest.approx(8.0)
    wakes.watch([model("a"), model("b", [node("d0", life="2")])], 10.0)
    wakes.watch([model("a", [node("d1", life="2")]), model("b", [node("d0")])], 11.0)
    assert wakes.times.expected_s("a") == pytest.approx(8.0), "it was only started again"


def test_who_does_not_lead_wakes_what_the_leader_does_not() -> None:
    nodes = [node("d0", busy=1)]
    wakes, now_s = known(model("a", nodes), model("b"))
    wakes.times.learn("a", FIRST_WAKE_S)
    wakes.times.learn("b", 3.0)
    for waited_s, orders in ((0.0, []), (3.0, []), (3.0 + FOLLOW_S, [Wake("d0", "b")])):
        asked = [model("a", nodes), model("b", waiting=waits(2, waited_s))]
        assert wakes.decide(asked, now_s, leads=False) == orders
    wakes, now_s = known(model("a", nodes), model("b"))
    mixed = [*waits(1, FIRST_WAKE_S + FOLLOW_S), *waits(5)]
    asked = [model("a", nodes, waits(1)), model("b", waiting=mixed)]
    assert wakes.decide(asked, now_s, leads=False) == [], "the others may yet be served"
    assert wakes.decide(asked, now_s) == [Wake("d0", "b")]


def test_a_model_has_one_place_of_a_node() -> None:
    def place(name: str, of: str, busy: int = 0) -> AwakeNode:
        return replace(node(name, busy=busy), place_of=of)

    a, b = [place("d0", "x")], [place("d1", "x"), place("d2", "y", busy=1)]
    wakes, now_s = known(model("a", a), model("b", b), model("c"))
    busy = [model("a", a, waits(3, waited_s=BUSY_S)), model("b", b), model("c")]
    assert wakes.decide(busy, now_s) == [Wake("d2", "a")], "not beside itself, though d1 is idle"
    wakes, now_s = known(model("a", a), model("b", b), model("c"))
    asked = [model("a", a), model("b", b), model("c", waiting=waits(4, waited_s=BUSY_S))]
    assert wakes.decide(asked, now_s) == [Wake("d0", "c")]
    assert wakes.decide(asked, now_s) == []
