"""Simulated nodes with drafts: as many tokens a step as are right, and the same answers."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.coordinator import Coordinator
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.node import Node
from pdserve.measured.calibration import Drafts
from pdserve.protocol import NodeRole
from pdserve.settings.config import Mode, PolicyConfig
from tests.matrix import matrix
from tests.simulation.machines import A100_13B
from tests.simulation.score import scored
from tests.simulation.workload import calls, lognormal, poisson


def simulated(right: float, mode: Mode = "disaggregated", share: float = 1.0) -> tuple[float, int]:
    """The median TPOT that users see, and the steps of all nodes."""
    machine = replace(A100_13B, drafts=Drafts(share, right))
    load = calls("a", poisson(1.0, 20, 0), lognormal(200, 0.5, 900), lognormal(80, 0.9, 300))
    events, decode = Events(), [NodeRole.DECODE]
    roles = decode * 2 if mode == "colocated" else [NodeRole.PREFILL, *decode]
    nodes = [Node(f"n{i}", role, machine, events, PolicyConfig()) for i, role in enumerate(roles)]
    cluster = Cluster(events, nodes)
    outcomes = scored(cluster, Coordinator(cluster, mode), load).outcomes
    assert all(len(o.token_times_s) == o.call.num_output for o in outcomes)
    for node in nodes:
        node.check_idle()
    told = [o.token_times_s for o in outcomes if o.call.num_output > 1]
    tpot_s = statistics.median((t[-1] - t[0]) / (len(t) - 1) for t in told)
    return tpot_s, sum(node.num_steps for node in nodes)


@pytest.mark.parametrize("mode", matrix(["disaggregated", "colocated"], 1))
def test_the_more_are_right_the_less_a_token_takes(mode: Mode) -> None:
    tpots_s, steps = zip(*(simulated(right, mode) for right in (0.0, 0.4, 0.8)), strict=True)
    assert tpots_s[0] > 1.2 * tpots_s[1] > 1.2 * 1.2 * tpots_s[2]
    assert steps[0] > steps[1] > steps[2]


def test_drafts_that_are_hardly_ever_right_cost_hardly_anything() -> None:
    assert simulated(0.01)[0] < 1.03 * simulated(0.0)[0]


def test_streams_of_which_little_is_guessed_gain_little() -> None:
    """However often guesses are right: so it was predicted twice too good behind random text."""
    plain_s, seldom_s, always_s = (simulated(0.5, share=n)[0] for n in (0.0, 0.05, 1.0))
    assert 0.9 * plain_s < seldom_s < plain_s
    assert always_s < 0.8 * plain_s
