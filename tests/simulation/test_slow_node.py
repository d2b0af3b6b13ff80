"""A node that becomes five times as slow is noticed within seconds, and given less."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from pdserve.engine.request import Request
from pdserve.protocol import NodeRole, Slo
from pdserve.settings.config import PolicyConfig
from tests.simulation.cluster import Cluster
from tests.simulation.coordinator import Coordinator
from tests.simulation.events import Events
from tests.simulation.machines import A100_13B
from tests.simulation.node import Node
from tests.simulation.score import Score
from tests.simulation.workload import calls, fixed, poisson

SLOWER = 5.0
SLOW_S, END_S = 20.0, 40.0  # when it becomes slow; the last arrivals
NOTICED_S = 2.0  # later
NUM_NODES = 3  # of each role; the first one of a role becomes slow


class Recorded(Node):
    """A node that remembers when it was given requests of its role."""

    def __init__(self, name: str, role: NodeRole, events: Events, *, becomes_slow: bool) -> None:
        def factor() -> float:
            return SLOWER if becomes_slow and events.now_s >= SLOW_S else 1.0

        super().__init__(name, role, A100_13B, events, PolicyConfig(), noise=factor)
        self.given_s: list[float] = []
        self.events = events

    def submit(self, request: Request) -> None:
        self.given_s.append(self.events.now_s)
        super().submit(request)

    def adopt(self, request: Request) -> None:
        self.given_s.append(self.events.now_s)
        super().adopt(request)

    def num_given(self, start_s: float, end_s: float) -> int:
        return sum(start_s <= at_s < end_s for at_s in self.given_s)


@dataclass(frozen=True)
class Run:
    score: Score
    nodes: list[Recorded]  # of the role of which one is slow; that one first

    def shares(self, start_s: float, end_s: float) -> list[float]:
        """What part of what came in this time each node was given."""
        given = [node.num_given(start_s, end_s) for node in self.nodes]
        return [number / sum(given) for number in given]


@cache
def slowed(role: NodeRole, per_s: float) -> Run:
    events = Events()
    nodes = [
        Recorded(f"{of.name.lower()}-{i}", of, events, becomes_slow=of is role and i == 0)
        for of in NodeRole
        for i in range(NUM_NODES)
    ]
    cluster = Cluster(events, nodes)
    load = calls("c", poisson(per_s, END_S, seed=1), fixed(700), fixed(50), Slo(), most_output=50)
    score = cluster.run(Coordinator(cluster, "disaggregated"), load)
    return Run(score, [node for node in nodes if node.role is role])


@pytest.mark.parametrize("role", NodeRole)
@pytest.mark.parametrize("per_s", [4.0, 16.0])
def test_it_is_given_less_within_seconds(role: NodeRole, per_s: float) -> None:
    """Of what it gets before that, nothing is lost; later it gets what it is worth at most."""
    run = slowed(role, per_s)
    assert len(run.score.served) == len(run.score.outcomes)
    fair = 1 / NUM_NODES
    assert run.shares(SLOW_S / 2, SLOW_S)[0] > 0.8 * fair
    assert run.shares(SLOW_S + NOTICED_S, END_S)[0] < fair / SLOWER
