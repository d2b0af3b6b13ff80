"""How many nodes are cheapest, by what they and broken promises cost in the next minutes."""

from __future__ import annotations

import pytest

from coordinator.admission.arrivals import Arrivals
from coordinator.pools.desired import PoolDemand, PromptDemand
from coordinator.pools.lookahead import MOST_WORK, STEP_S, Ahead, LookAhead, missed
from pdserve.protocol import NodeRole
from pdserve.shared.clock import ManualClock

P, D = NodeRole.PREFILL, NodeRole.DECODE
STEPS = 8


def prompts(
    busy: list[float], ready: int, *, start_s: float = 30.0, queued_s: float = 0.0,
    price: float = 1.0, rate: float = 4.0,
) -> Ahead:  # fmt: skip
    """A pool of prompts; `busy`: at each step, the last one for all further ones."""
    busy += busy[-1:] * (STEPS - len(busy))
    demand = PoolDemand(ready, 0, lambda n: 0.0, PromptDemand(busy[0], queued_s, ttft_s=2.0))
    return Ahead(demand, price, start_s, [1.0] * STEPS, busy, [rate] * STEPS)


def streams(load: float, ready: int, growth: list[float]) -> Ahead:
    """A pool of streams, which `load` nodes would have just enough time for."""
    growth += growth[-1:] * (STEPS - len(growth))
    return Ahead(
        PoolDemand(ready, 0, lambda n: load / n), 1.0, 30.0, growth, [0.0] * STEPS, [4.0] * STEPS
    )


def test_promises_break_from_just_below_the_load_that_just_keeps_them() -> None:
    assert missed(0.5) < 1e-6
    assert missed(0.8) == pytest.approx(0.023, abs=0.002)
    assert missed(1.0) == 0.5
    assert missed(3.0) == pytest.approx(3.0), "and delay those that come later"


@pytest.mark.parametrize(("busy", "number"), [(0.2, 1), (0.6, 1), (0.9, 2), (1.4, 2), (2.9, 4)])
def test_steady_prompts_have_the_nodes_that_keep_their_promises(busy: float, number: int) -> None:
    assert prompts([busy], ready=number).cheapest(1) == number
    assert streams(busy, number, [1.0]).cheapest(1) == number


def test_a_node_is_wanted_as_long_before_as_it_takes_to_start() -> None:
    rises = [0.6, 0.6, 0.6, 0.6, 1.4]  # in a minute
    assert prompts([*rises], ready=1).cheapest(1) == 2
    assert streams(0.6, 1, [busy / 0.6 for busy in rises]).cheapest(1) == 2


def test_none_goes_that_is_wanted_again_soon() -> None:
    """It would have to start anew."""
    assert prompts([0.3], ready=2).is_enough(1)
    assert not prompts([0.3, 0.3, 0.3, 1.4], ready=2).is_enough(1)


def test_one_goes_only_if_the_others_could_bear_what_comes_by_chance() -> None:
    """So that it does not come back with the next few requests."""
    at_the_edge = prompts([0.68], ready=2)
    assert at_the_edge.cheapest(1) == 1
    assert not at_the_edge.is_enough(1)
    assert at_the_edge.is_enough(2)


def test_what_waits_is_worth_more_nodes_until_it_is_done() -> None:
    assert prompts([0.6], ready=1).cheapest(1) == 1
    behind = prompts([0.6], ready=1, queued_s=60.0)
    assert behind.cheapest(1) == 2
    assert prompts([0.6], ready=3, queued_s=60.0).cheapest(1) >= 3


def test_a_flood_is_looked_at_in_few_numbers_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    flood, asked = prompts([1e5], ready=2, rate=1e5), []
    cost = Ahead.cost

    def counted(self: Ahead, number: int, stress: float = 1.0) -> float:
        asked.append(number)
        return cost(self, number, stress)

    monkeypatch.setattr(Ahead, "cost", counted)
    assert flood.cheapest(2) == pytest.approx(2e5, rel=0.04)
    assert len(asked) < 500, "the loop would be blocked for seconds"
    assert asked[:30] == list(range(2, 32))


def test_a_dearer_node_is_wanted_for_more_broken_promises_only() -> None:
    assert prompts([0.80], ready=2, price=0.5, rate=1.0).cheapest(1) == 2
    assert prompts([0.80], ready=2, price=2.0, rate=1.0).cheapest(1) == 1


def test_prompts_of_all_coordinators_count_and_batches_take_less_than_their_prompts() -> None:
    clock, arrivals = ManualClock(), Arrivals()
    look = LookAhead(arrivals, clock, lambda role: 30.0, {P: 1.0, D: 1.0})
    demand = PoolDemand(4, 0, lambda n: 0.0, PromptDemand(2.0, 0.0, ttft_s=2.0))
    assert look.at(P, demand) is None, "nothing is known"
    for _ in range(400):  # 1 node's work, and what the pool does is 2
        arrivals.observe("chat", 1.0, clock.now())
        clock.advance(1.0)
        ahead = look.at(P, demand)
    assert ahead is not None
    assert len(ahead.rates) * STEP_S >= 120
    assert ahead.busy[0] == pytest.approx(2.0, rel=0.05)


def test_long_prompts_that_came_before_make_later_ones_no_larger_without_bounds() -> None:
    """The pool still works on them when hardly anything comes any more."""
    clock, arrivals = ManualClock(), Arrivals()
    look = LookAhead(arrivals, clock, lambda role: 30.0, {P: 1.0, D: 1.0})
    demand = PoolDemand(4, 0, lambda n: 0.0, PromptDemand(2.0, 0.0, ttft_s=2.0))
    for _ in range(200):
        arrivals.observe("chat", 1e-9, clock.now())
        clock.advance(1.0)
        look.at(P, demand)
    for _ in range(60):
        arrivals.observe("usual", 1.0, clock.now())
        clock.advance(1.0)
        ahead = look.at(P, demand)
    assert ahead is not None
    assert ahead.busy[0] <= MOST_WORK


def test_when_load_falls_prompts_are_not_taken_for_larger_than_they_are() -> None:
    """A pool works on what has come lately, whatever is forecast."""
    clock, arrivals = ManualClock(), Arrivals()
    look = LookAhead(arrivals, clock, lambda role: 30.0, {P: 1.0, D: 1.0})
    for second in range(420):
        if second < 240 or second % 10 == 0:  # one a second, then one in ten
            arrivals.observe("chat", 1.0, clock.now())
        clock.advance(1.0)
        busy = arrivals.recent_rate(60.0)
        ahead = look.at(P, PoolDemand(4, 0, lambda n: 0.0, PromptDemand(busy, 0.0, ttft_s=2.0)))
        if ahead is not None:
            assert ahead.busy[0] == pytest.approx(ahead.rates[0], rel=0.05)
