"""What calls wait for while hosts of the two pools do not hear each other, on virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
from msgspec.structs import replace

from coordinator.generation import GenerationRequest
from pdserve.protocol import NodeRole, Prompt, SamplingParams
from pdserve.settings.config import EngineConfig, NodeConfig
from tests.lives.clients import Call, Told
from tests.lives.coordinator import ADDRESS
from tests.lives.faults import Fault
from tests.lives.kv import BLOCK
from tests.lives.life import live
from tests.lives.plan import FIRST_S, TIMEOUTS, Plan, PlannedNode

PREFILLS, DECODES = (0, 1), (2, 3)
CUT_S = 2 * FIRST_S
EVERY_S = 0.05  # a call
SLOW_S = 0.4  # a call that waits for nobody takes less
SLOWLY = replace(TIMEOUTS, connect_s=3.0)  # than `liveness_s`, as by default
ENGINE = EngineConfig(block_size=BLOCK, token_budget=64, max_batch_size=8)
FOUND_S = 1.2  # two pings without an acknowledgement, and a tick


@dataclass(frozen=True)
class Waited:
    """How long a call took, and when it began, after the cut."""

    began_s: float
    took_s: float


def calls_during(cuts: list[tuple[int, int]], for_s: float) -> list[Waited]:
    """Calls all the time, from before these pairs are cut until a while after they are not."""
    told = [
        Told(
            GenerationRequest(
                request_id=f"r{number}",
                prompt=Prompt([number % 7 + 1] * 3 * BLOCK),
                sampling=SamplingParams(max_tokens=5, ignore_eos=True),
            )
        )
        for number in range(int((for_s + 4.0) / EVERY_S))
    ]
    calls = [Call(FIRST_S + EVERY_S * number, [each]) for number, each in enumerate(told)]
    faults = [Fault(CUT_S, "cut", *pair, for_s, 1) for pair in cuts]
    plan = Plan(
        mode="disaggregated",
        nodes=[_node(n, NodeRole.PREFILL) for n in PREFILLS]
        + [_node(n, NodeRole.DECODE) for n in DECODES],
        calls=calls,
        faults=faults,
        max_inflight=100,
        is_two_sided=True,
        has_checksums=False,
        pulls_slowness=1.0,
    )
    assert live(1, plan=plan).wrong == []
    began_s = FIRST_S - CUT_S
    return [
        Waited(began_s + EVERY_S * number, each.ended_s - each.started_s)
        for number, each in enumerate(told)
    ]


def _node(number: int, role: NodeRole) -> PlannedNode:
    name = f"n{number}"
    config = NodeConfig(
        node_id=name, host=name, port=7, coordinators=[ADDRESS], engine=ENGINE, timeouts=SLOWLY
    )
    return PlannedNode(config, role, num_blocks=400)


CUTS = {
    "one pair": [(0, 2)],
    "one decode node": list(product(PREFILLS, [3])),
    "all": list(product(PREFILLS, DECODES)),
}


CASES = [("all", 8.0), ("one pair", 3.0), *product(CUTS, [3.0, 8.0])]


@pytest.mark.long  # a node that nobody reaches costs little by default
@pytest.mark.parametrize(("cut", "for_s"), dict.fromkeys(CASES))
def test_a_pair_that_is_cut_costs_one_probe_at_a_time(cut: str, for_s: float) -> None:
    """Whoever finds the cut waits for a second; then one new call, after 1, 2, 4 s, tries a way."""
    pairs = CUTS[cut]
    waited = calls_during(pairs, for_s)
    slow = [each for each in waited if each.took_s > SLOW_S]
    assert all(each.took_s < TIMEOUTS.liveness_s + SLOW_S for each in slow), slow
    assert any(each.began_s >= 0 for each in slow) or cut == "one pair", "the cut has done nothing"
    later = [each for each in slow if each.began_s > FOUND_S]
    assert len(later) <= len(pairs) * (2 if for_s < 4 else 3), later
