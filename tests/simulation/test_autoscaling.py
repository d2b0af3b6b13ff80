"""Pools under load that changes, as desired: by flips, nodes on standby, and new processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import cast

import pytest

from coordinator.admission.arrivals import DAY_S
from coordinator.pools.desired import UNKNOWN_S
from coordinator.status import ROLES
from pdserve.commands.cluster.config import Scale
from pdserve.protocol import NodeRole, SetRole
from pdserve.shared.clock import ManualClock
from tests.fakes.members import said_to
from tests.matrix import matrix
from tests.simulation.fluid import LOAD_S, MOST_START_S, TTFT_S, D, Load, P, World, at_noon, by_day


def settled(world: World) -> World:
    """After long enough for a node on standby to have loaded, and for flips to be allowed."""
    world.run(LOAD_S + 15)
    assert world.happened() == {"start on standby": 1}, world.told
    return world


# Long prompts: the decode nodes have time to spare.
PROMPTS = Load(rate=4.0, prompt_s=0.35)
# Short ones: a prefill node has nearly nothing to do.
ANSWERS = Load(rate=24.0, prompt_s=0.004)


@pytest.mark.parametrize(
    ("load", "first", "short"),
    matrix([(PROMPTS, {P: 2, D: 3}, P), (ANSWERS, {P: 3, D: 2}, D)], 1),
    ids=["prompts", "answers"],
)
def test_three_times_the_load_is_answered_by_a_flip_then_by_standby_then_by_new_nodes(
    load: Load, first: dict[NodeRole, int], short: NodeRole
) -> None:
    world = settled(World(Scale(1, 6), first, replace(load)))
    step_s, before = world.clock.now(), world.ready(short)
    world.load.rate *= 3
    world.run(5.0)
    in_time = [what for at_s, what in world.told if at_s > step_s]
    assert in_time[0].endswith(f"to {ROLES[short]}"), in_time
    assert world.ready(short) > before
    world.run(180.0)
    means = [what.rpartition(" ")[0] for at_s, what in world.told if at_s > step_s]
    assert means.index("standby begins") < means.index("start"), world.told
    assert world.loads.of(short) < 1.0, "promises are kept again"
    assert world.queue_s < TTFT_S * world.ready(P)


@pytest.mark.long
@pytest.mark.parametrize(("rate", "noise"), matrix([(7.0, 0.15), (1.0, 0.0), (17.0, 0.15)], 1))
def test_an_hour_of_the_same_load_settles_and_stays(rate: float, noise: float) -> None:
    world = World(Scale(1, 6), {P: 2, D: 2}, Load(rate=rate, prompt_s=0.1, noise=noise))
    world.run(3600)
    assert world.happened(since_s=900) == {}, world.told
    assert world.loads.of(P) < 1.0
    assert world.loads.of(D) < 1.0
    assert sum(process.member.is_standby for process in world.processes.values()) == 1


def test_no_nodes_while_nobody_asks_and_no_request_is_lost() -> None:
    load = Load(rate=5.0, prompt_s=0.05)
    world = World(Scale(0, 3), {P: 1, D: 1}, load, sleep_after_s=60.0)
    world.run(120)
    load.rate = 0.0
    world.run(300)
    assert world.processes == {}, "the one on standby has gone too"
    assert world.served == pytest.approx(world.arrived, abs=1.0)
    load.rate = 5.0
    world.run(LOAD_S - 1)
    assert world.line == pytest.approx(5.0 * (LOAD_S - 1), abs=0.1), "they wait"
    world.run(60)
    load.rate = 0.0
    world.run(30)
    assert world.num_inflight < 1.0
    assert world.served == pytest.approx(world.arrived, abs=1.0)


def test_a_node_that_is_lost_is_replaced_by_the_one_on_standby_at_once() -> None:
    world = settled(World(Scale(1, 3), {P: 1, D: 1}, Load(rate=2.0, prompt_s=0.05)))
    lost = world.processes.pop("decode-0")
    world.registry.remove(lost.member)
    standby = next(p.member for p in world.processes.values() if p.on_standby)
    assert cast("SetRole", said_to(standby)[-1]).role is D, "before anything else happens"
    world.run(1.0)
    assert world.ready(D) == 1


HUNG = {"prefill-1": inf, "decode-1": inf}


def odd_world(most: int, rate: float, load_s: Callable[[str], float] = lambda _: LOAD_S) -> World:
    return World(Scale(1, most), {P: 1, D: 1}, Load(rate, 0.1), load_s=load_s)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nodes_that_never_come_to_work_stand_in_nobodys_way() -> None:
    world = odd_world(4, 2.0, lambda name: HUNG.get(name, LOAD_S))
    world.run(30)
    world.load.rate = 20.0
    world.run(420)
    assert world.ready(P) + world.ready(D) >= 5, world.told
    world.load.rate = 2.0
    world.run(600)
    assert (world.ready(P), world.ready(D)) == (1, 1), world.told


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nodes_that_never_come_to_work_do_not_keep_others_either() -> None:
    """Nobody is there to replace them."""
    world = odd_world(2, 20.0, lambda name: HUNG.get(name, LOAD_S))
    world.run(120)
    assert (world.desired.numbers[P], world.ready(P)) > (2, 1)
    world.load.rate = 2.0
    world.run(UNKNOWN_S + 150)
    assert world.desired.numbers == {P: 1, D: 1}
    world.run(MOST_START_S - UNKNOWN_S)
    assert "prefill-1" not in world.processes, world.told


@pytest.mark.long
@pytest.mark.timeout(900)
def test_starts_of_ten_times_the_usual_length_end_in_nodes() -> None:
    took_s = [LOAD_S]
    world = odd_world(4, 2.0, lambda _: took_s[0])
    world.run(45)
    took_s[0], world.load.rate = 10 * LOAD_S, 20.0
    world.run(900)
    assert world.happened()["start"] <= 6, world.told
    assert world.loads.of(P) < 1.0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_who_dies_on_standby_costs_no_node_that_works() -> None:
    world = settled(odd_world(4, 5.0))
    for _ in range(10):
        world.run(LOAD_S + 15)
        for process in [*world.processes.values()]:
            if process.member.is_standby:
                world.lose(process)
    assert world.happened().keys() == {"start on standby"}, world.told
    world.load.rate = 25.0
    world.run(120)
    assert world.ready(P) >= 3, "it still grows"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_coordinator_that_takes_over_changes_nothing() -> None:
    world = odd_world(6, 18.0)
    world.run(600)
    for _ in range(3):
        world.decide_anew()
        world.run(120)
    assert world.happened(since_s=600) == {}, world.told


def around_noon(*, foresees: bool) -> World:
    """The hour in which load is four times as high, on the second day."""
    clock = ManualClock()
    world = World(
        Scale(1, 6), {P: 1, D: 1}, Load(2.0, 0.35, noise=0.2), foresees=foresees, clock=clock
    )
    number, sent, begins_s = 0.0, 0, 1.5 * DAY_S - 300
    while clock.now() < begins_s:  # what is known of the day before
        number += 10 * at_noon(clock.now())
        for _ in range(int(number) - sent):
            world.promises.arrivals.observe("", 0.35, clock.now())
        sent = int(number)
        clock.advance(10.0)
        world.promises.arrivals.look(clock.now())
    world.told.clear()
    for process in world.processes.values():
        process.loaded_s = 0.0
    while clock.now() < begins_s + 900:
        world.load.rate = at_noon(clock.now())
        world.run(10.0)
    return world


@pytest.mark.long  # test_lookahead.py has it by default
def test_what_repeats_daily_is_met_before_it_comes() -> None:
    ahead, behind = around_noon(foresees=True), around_noon(foresees=False)
    noon_s = 1.5 * DAY_S
    started = [at_s - noon_s for at_s, what in ahead.told if what.startswith("standby begins")]
    assert -2 * LOAD_S - 60 < started[0] < 0, ahead.told
    assert behind.missed > 100
    assert ahead.missed < 0.2 * behind.missed
    assert ahead.node_s < 1.2 * behind.node_s


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_day_brings_few_changes_and_each_pool_follows() -> None:
    """At the peak it is six processes, one of them on standby; on average one fewer."""
    world = World(Scale(1, 6), {P: 1, D: 1}, Load(1.0, 0.35, noise=0.3))
    for _ in range(round(DAY_S / 30)):
        world.load.rate = by_day(world.clock.now())
        world.run(30)
    begun = world.happened()["standby begins"] + world.happened()["start"]
    assert 2 <= begun <= 12, world.told
    assert world.happened()["retire"] <= begun + 2
    assert world.attainment > 0.99
    assert world.node_s < 5.1 * DAY_S
