"""Flowing mode in simulated clusters: streams move, none is lost, and slack decides which."""

from __future__ import annotations

import pytest

from pdserve.commands.simulation.call import Call
from pdserve.protocol import Slo
from pdserve.settings.config import PolicyConfig
from tests.matrix import matrix
from tests.simulation.machines import A100_13B
from tests.simulation.modes.test_adaptive import documents
from tests.simulation.scenarios import fleet
from tests.simulation.workload import calls, lognormal, poisson

POLICY = PolicyConfig()


def loose_documents(per_s: float) -> list[Call]:
    slo = Slo(name="loose", ttft_s=4.0, tpot_s=0.5)
    times = poisson(per_s, 40, seed=1)
    return calls("r", times, lognormal(3000, 0.6, 12000), lognormal(100, 0.5, 400), slo)


def test_streams_at_risk_flow_and_the_promise_is_kept() -> None:
    run = fleet(2, 2, "flowing", documents(2.5), POLICY, A100_13B)
    assert run.num_moved > 10
    assert run.score.attainment > 0.95


@pytest.mark.long
def test_streams_with_slack_stay_on_prefill_nodes() -> None:
    """There they leave the decode nodes to others, and large chunks save time."""
    load = loose_documents(3.0)
    run = fleet(2, 2, "flowing", load, POLICY, A100_13B)
    assert run.num_moved == 0
    assert all(node.prompt_s > 0 for node in run.nodes)
    assert min(node.num_steps for node in run.nodes[:2]) > 500, "they decode too"
    assert run.score.attainment > 0.99


@pytest.mark.long
@pytest.mark.parametrize("other", matrix(["disaggregated", "adaptive", "colocated"], 1))
def test_it_is_none_of_the_other_modes(other: str) -> None:
    load = documents(2.5)
    flowing, others = (
        fleet(0 if mode == "colocated" else 2, 4 if mode == "colocated" else 2, mode, load, POLICY)
        for mode in ("flowing", other)
    )
    assert others.num_moved == 0
    assert [o.token_times_s for o in flowing.score.outcomes] != [
        o.token_times_s for o in others.score.outcomes
    ]
