"""A node that becomes five times as slow is given less within seconds, for as long as it is."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest

from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.coordinator import Coordinator
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.node import Node
from pdserve.commands.simulation.step_times import NoScatter, Timed
from pdserve.engine.request import Request
from pdserve.measured.perf_model import FORGET_S
from pdserve.protocol import NodeRole, Slo
from pdserve.settings.config import PolicyConfig
from tests.matrix import matrix
from tests.simulation.machines import A100_13B
from tests.simulation.score import Score, scored
from tests.simulation.workload import calls, fixed, poisson

SLOWER = 5.0
SLOW_S = 20.0  # when it becomes slow
NOTICED_S = 2.0  # later
SPELL_S = 5.0  # for how long it is slow, if not for good
NUM_NODES = 3  # of each role; the first one of a role becomes slow
FAIR = 1 / NUM_NODES


class Slow(NoScatter):
    """Steps take longer for a while."""

    def __init__(self, events: Events, slow_s: float) -> None:
        self.events = events
        self.slow_s = slow_s

    def draw(self, timed: Timed) -> float:
        """As Scatter.draw."""
        return SLOWER if SLOW_S <= self.events.now_s < SLOW_S + self.slow_s else 1.0


class Recorded(Node):
    """A node that remembers when it was given requests of its role."""

    def __init__(self, name: str, role: NodeRole, events: Events, slow_s: float) -> None:
        slow = Slow(events, slow_s)
        # Without strides, whose steps' times are drawn before the time of the step.
        super().__init__(name, role, A100_13B, events, PolicyConfig(), scatter=slow, strides=False)
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

    def share(self, start_s: float, end_s: float) -> float:
        """What part of what came in this time the slow node was given."""
        given = [node.num_given(start_s, end_s) for node in self.nodes]
        return given[0] / sum(given)


def slowed(role: NodeRole, per_s: float, slow_s: float, end_s: float) -> Run:
    """One node of the role is slow for so long; calls arrive until the end."""
    events = Events()
    nodes = [
        Recorded(f"{of.name.lower()}-{i}", of, events, slow_s if of is role and i == 0 else 0.0)
        for of in NodeRole
        for i in range(NUM_NODES)
    ]
    cluster = Cluster(events, nodes)
    load = calls("c", poisson(per_s, end_s, seed=1), fixed(700), fixed(50), Slo(), most_output=50)
    score = scored(cluster, Coordinator(cluster, "disaggregated"), load)
    assert len(score.served) == len(score.outcomes)
    return Run(score, [node for node in nodes if node.role is role])


@pytest.mark.parametrize("role", matrix(NodeRole, 1))
@pytest.mark.parametrize("per_s", matrix([4.0, 16.0], 1))
def test_it_is_given_less_within_seconds(role: NodeRole, per_s: float) -> None:
    """No more than it is worth; and it is asked again and again whether that is still so."""
    end_s = 80.0
    run = slowed(role, per_s, inf, end_s)
    assert run.share(SLOW_S / 2, SLOW_S) > 0.8 * FAIR
    assert run.share(SLOW_S + NOTICED_S, SLOW_S + FORGET_S) < FAIR / SLOWER
    assert 0 < run.share(SLOW_S + FORGET_S, end_s) < FAIR / SLOWER


@pytest.mark.long
@pytest.mark.parametrize("role", matrix(NodeRole, 1))
@pytest.mark.parametrize("per_s", matrix([4.0, 16.0], 1))
def test_a_slow_spell_is_forgotten(role: NodeRole, per_s: float) -> None:
    back_s = SLOW_S + SPELL_S + FORGET_S + NOTICED_S
    run = slowed(role, per_s, SPELL_S, back_s + 20.0)
    assert run.share(back_s, back_s + 20.0) > 0.8 * FAIR
