"""How many nodes a pool should have: soon more, slowly fewer, never fewer without data."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import pytest

from coordinator.pools.desired import (
    BUSY,
    GROWTH,
    IDLE_S,
    SUSTAINED_S,
    UNKNOWN_S,
    DesiredNodes,
    PoolDemand,
)
from pdserve.protocol import NodeRole
from pdserve.shared.clock import ManualClock

P, D = NodeRole.PREFILL, NodeRole.DECODE
TICK_S = 0.5
LOAD_S = 20.0  # until a new node is ready


class Pool:
    """A pool whose work fills `work` nodes, and an autoscaler that does as it is told."""

    def __init__(self, num_nodes: int, work: float) -> None:
        self.work = work
        self.ready = num_nodes
        self.loading: deque[float] = deque()  # until when
        self.clock = ManualClock()
        self.policy = DesiredNodes(self.clock)
        self.random = random.Random(0)
        self.changes: list[tuple[float, int]] = []  # (time, desired)
        self.backlog = 0.0  # in seconds of one node

    @property
    def desired(self) -> int:
        return self.policy.numbers[P]

    def run(self, seconds: float, noise: float = 0.0) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            while self.loading and self.loading[0] <= self.clock.now():
                self.loading.popleft()
                self.ready += 1
            work = self.work * (1 + noise * self.random.uniform(-1, 1))
            self.backlog = max(0.0, self.backlog + (work - self.ready) * TICK_S)
            busy = float(self.ready) if self.backlog else min(work, self.ready)
            load = max(busy, self.backlog)  # a queue of a second is just in time
            self.policy.tick(
                {P: PoolDemand(self.ready, len(self.loading), lambda n, load=load: load / n)}
            )
            before = self.changes[-1][1] if self.changes else self.ready
            if self.desired != before:
                self.changes.append((self.clock.now(), self.desired))
            while self.ready + len(self.loading) < self.desired:
                self.loading.append(self.clock.now() + LOAD_S)
            if not self.loading:
                self.ready = min(self.ready, self.desired)


def test_three_times_the_load_is_asked_for_in_seconds_and_answered_when_nodes_load() -> None:
    pool = Pool(2, work=1.2)
    pool.run(60)
    assert pool.desired == 2
    pool.work *= 3
    pool.run(5)
    assert pool.desired > 2
    pool.run(2 * LOAD_S + 10)
    assert pool.ready >= 4
    assert pool.work / pool.ready <= 1
    pool.run(60)
    assert pool.backlog == 0


@pytest.mark.parametrize("work", [0.0, 0.3, 0.79, 0.81, 1.5, 2.39, 2.41, 4.0])
def test_an_hour_of_the_same_load_settles_and_stays(work: float) -> None:
    pool = Pool(3, work)
    pool.run(3600, noise=0.1)
    settled = [change for change in pool.changes if change[0] > 600]
    assert len(settled) <= (work == 2.39), "just below the limit, noise may cross it late: once"
    assert pool.work <= BUSY * 1.1 * pool.ready
    assert pool.ready <= max(1, pool.work / 0.5) + 1


def test_fewer_are_asked_for_one_at_a_time_and_late() -> None:
    pool = Pool(5, work=0.2)
    pool.run(6 * IDLE_S)
    times = [at_s for at_s, _ in pool.changes]
    assert [number for _, number in pool.changes] == [4, 3, 2, 1]
    assert times[0] >= IDLE_S
    assert all(later - earlier >= IDLE_S for earlier, later in pairwise(times))


def test_nobody_is_sent_away_while_something_is_not_known() -> None:
    clock = ManualClock()
    policy = DesiredNodes(clock)
    for _ in range(round(UNKNOWN_S)):
        clock.advance(1.0)
        policy.tick({D: PoolDemand(2, 1, lambda n: 0.0)})  # the third one is silent
    assert policy.numbers == {D: 3}
    for _ in range(1000):
        clock.advance(1.0)
        policy.tick({D: PoolDemand(0, 1, lambda n: 0.0)})  # and so are the others, now
    assert policy.numbers == {D: 3}


def test_nodes_that_never_come_to_work_keep_nobody_for_ever() -> None:
    clock = ManualClock()
    policy = DesiredNodes(clock)
    for second in range(round(UNKNOWN_S + IDLE_S) + 2):
        clock.advance(1.0)  # the third one loads, ends, and loads again
        policy.tick({D: PoolDemand(2, 1 if second % 20 else 0, lambda n: 0.0)})
    assert policy.numbers == {D: 1}


def test_what_a_pool_could_not_have_is_not_wanted_for_ever() -> None:
    clock = ManualClock()
    policy = DesiredNodes(clock)
    for load, desired in ((4.0, 2), (0.2, 1)):
        for _ in range(round(IDLE_S) + 2):
            clock.advance(1.0)
            policy.tick({P: PoolDemand(1, 0, lambda n, load=load: load / n)})
        assert policy.numbers == {P: desired}


def test_what_is_desired_beyond_what_there_is_delays_nobody() -> None:
    """Six would be wanted; then three do, and twenty seconds later two."""
    clock = ManualClock()
    policy = DesiredNodes(clock)
    idle_s = round(IDLE_S)
    numbers = []
    for load in [5.0] * 10 + [1.5] * 20 + [0.9] * (idle_s + 10):
        clock.advance(1.0)
        policy.tick({P: PoolDemand(3, 0, lambda n, load=load: load / n)})
        numbers.append(policy.numbers[P])
    assert max(numbers) == 6
    assert numbers.index(2) == 30 + idle_s
    assert numbers.index(3, numbers.index(6)) == 10 + idle_s


def test_what_nobody_has_looked_at_has_not_lasted() -> None:
    """The process stood still, or the machine did."""
    clock = ManualClock()
    policy = DesiredNodes(clock)
    policy.tick({D: PoolDemand(2, 0, lambda n: 0.1 / n), P: PoolDemand(2, 0, lambda n: 9.0 / n)})
    clock.advance(3600.0)
    policy.tick({D: PoolDemand(2, 0, lambda n: 0.1 / n), P: PoolDemand(2, 0, lambda n: 9.0 / n)})
    assert policy.numbers == {D: 2, P: 2}


def test_a_coordinator_that_is_started_again_sends_nobody_away() -> None:
    """Its nodes come back one after the other; what they are for is not known yet."""
    clock = ManualClock()
    policy = DesiredNodes(clock)
    for ready in [0, 3, 7, *[10] * 100]:
        policy.tick({P: PoolDemand(ready, 0, lambda n: 2.0 / n)})
        clock.advance(TICK_S)
        assert policy.numbers == {P: max(1, ready)}
    policy.tick({P: PoolDemand(12, 0, lambda n: 2.0 / n)})
    assert policy.numbers == {P: 10}, "more than are wanted"
    for _ in range(round(2 * IDLE_S / TICK_S)):
        policy.tick({P: PoolDemand(10, 0, lambda n: 2.0 / n)})
        clock.advance(TICK_S)
    assert 8 <= policy.numbers[P] < 10, "then one at a time, and late"


def test_a_pool_without_nodes_wants_one() -> None:
    policy = DesiredNodes(ManualClock())
    assert policy.numbers == {}
    policy.tick({P: PoolDemand(0, 0, lambda n: 0.0)})
    assert policy.numbers == {P: 1}


def test_a_pool_far_behind_asks_for_no_more_than_it_can_know() -> None:
    clock = ManualClock()
    policy = DesiredNodes(clock)
    for _ in range(20):
        policy.tick({P: PoolDemand(2, 0, lambda n: 50.0 / n)})
        clock.advance(1.0)
    assert policy.numbers == {P: 2 * GROWTH}


def test_a_burst_is_left_to_the_queue() -> None:
    pool = Pool(2, work=1.0)
    pool.run(30)
    pool.work = 1.9
    pool.run(SUSTAINED_S - TICK_S)
    pool.work = 1.0
    pool.run(30)
    assert pool.changes == []


def test_after_a_while_without_requests_no_node_is_desired_until_the_next() -> None:
    clock = ManualClock()
    policy = DesiredNodes(clock, sleep_after_s=60.0)
    busy = {role: PoolDemand(1, 0, lambda n: 0.1 / n) for role in (P, D)}
    none = {role: PoolDemand(0, 0, lambda n: 0.0) for role in (P, D)}

    def run(seconds: float, demands: dict[NodeRole, PoolDemand], num_requests: int = 0) -> None:
        for _ in range(round(seconds / TICK_S)):
            clock.advance(TICK_S)
            policy.tick(demands, num_requests)

    run(200, busy, num_requests=1)
    run(59, busy)
    assert policy.numbers == {P: 1, D: 1}
    run(2, busy)
    assert policy.numbers == {P: 0, D: 0}
    run(600, busy)  # however long they take to end
    run(3600, none)
    assert policy.numbers == {P: 0, D: 0}
    run(TICK_S, none, num_requests=3)
    assert policy.numbers == {P: 1, D: 1}
    run(300, none, num_requests=3)  # they load
    assert policy.numbers == {P: 1, D: 1}


def test_nodes_never_sleep_unless_that_is_asked_for() -> None:
    pool = Pool(3, work=0.0)
    pool.run(3600)
    assert pool.desired == 1


def test_a_part_of_the_load_is_that_of_as_many_nodes() -> None:
    demand = PoolDemand(ready=2, others=0, load_with=lambda number: 4 / number).of_share(0.25)
    assert [demand.load_with(number) for number in (1, 2, 4)] == [1.0, 0.5, 0.25]
