"""Each policy chooses by what it says."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np
import pytest

from coordinator.generation import GenerationRequest
from coordinator.prefixes.index import Hits
from coordinator.routing.candidates import Candidates, RoutingPolicy
from coordinator.routing.policies import make_policy
from coordinator.routing.policies.prefix_affinity import LOAD_BOUND
from pdserve.protocol import NodeRole, Prompt, SamplingParams
from tests.unit.coordinator.routing.nodes import Nodes

NODES = Nodes(p=20)
SLOTS = np.arange(20)


def candidates(
    cost_s: list[float] | None = None,
    load: list[int] | None = None,
    prompt: int = 0,
    slots: object = SLOTS,
) -> Candidates:
    request = GenerationRequest(
        request_id="r", prompt=Prompt([prompt] * 200), sampling=SamplingParams()
    )
    assert isinstance(slots, np.ndarray)
    by_slot = np.ones(20), np.zeros(20, np.int64)
    if cost_s is not None:
        by_slot[0][slots] = cost_s
    if load is not None:
        by_slot[1][slots] = load
    nowhere = np.array([], np.int64)
    hits = Hits(200, nowhere, nowhere, nowhere)
    return Candidates("prefill", request, slots, *by_slot, NODES.router.fleet.members, hits)


def test_predicted_takes_the_least_time_then_the_least_load_then_turns() -> None:
    policy, slots = make_policy("predicted"), np.array([3, 5, 8])
    assert policy.pick(candidates([3.0, 1.0, 2.0], [0, 9, 0], slots=slots)) == 5
    assert policy.pick(candidates([1.0, 1.0, 1.0], [2, 1, 2], slots=slots)) == 5
    picks = [policy.pick(candidates([1.0, 2.0, 1.0], [4, 0, 4], slots=slots)) for _ in range(4)]
    assert sorted(picks) == [3, 3, 8, 8]


def test_least_loaded_takes_the_least_load() -> None:
    slots = np.array([3, 5, 8])
    picked = make_policy("least-loaded").pick(candidates([9.0, 1.0, 9.0], [1, 2, 0], slots=slots))
    assert picked == 8


def test_round_robin_goes_on_where_it_was_whoever_leaves() -> None:
    policy = make_policy("round-robin")
    assert [policy.pick(candidates(slots=np.array([1, 4, 6]))) for _ in range(4)] == [1, 4, 6, 1]
    assert [policy.pick(candidates(slots=np.array([2, 6]))) for _ in range(3)] == [2, 6, 2]


def test_random_is_even() -> None:
    policy = make_policy("random")
    counts = Counter(policy.pick(candidates()) for _ in range(2000))
    assert len(counts) == 20
    assert max(counts.values()) < 150


def test_power_of_two_is_much_more_even_than_random() -> None:
    """Balls into bins: log log n against log n over log log n."""

    def most(policy: RoutingPolicy) -> int:
        load = [0] * 20
        for _ in range(2000):
            load[policy.pick(candidates(load=load))] += 1
        return max(load)

    assert most(make_policy("power-of-two")) <= 104 < most(make_policy("random"))


def test_affinity_sends_prompts_that_begin_alike_to_the_same_node() -> None:
    policy = make_policy("prefix-affinity")
    homes = {prompt: policy.pick(candidates(prompt=prompt)) for prompt in range(100)}
    assert {p: policy.pick(candidates(prompt=p)) for p in homes} == homes
    assert len(set(homes.values())) > 10


def test_prompts_of_other_kv_begin_otherwise_and_plain_ones_as_they_always_have() -> None:
    """Coordinators of two builds have the same homes for them, while one replaces the other."""
    tokens = [1, 2, 3]
    assert Prompt(tokens).beginning(2) == array("q", [1, 2]).tobytes()
    assert Prompt(tokens, "s").beginning(2) == array("q", [1, 2]).tobytes() + b"s"
    others = [
        Prompt(tokens, salt, is_long=is_long, adapter=adapter).beginning(2)
        for salt in ("", "a", "\xffa ", "a ")
        for is_long in (False, True)
        for adapter in ("", "a", "b")
    ]
    assert len(set(others)) == len(others)


def test_affinity_moves_only_the_prompts_of_a_node_that_left() -> None:
    policy = make_policy("prefix-affinity")
    homes = {prompt: policy.pick(candidates(prompt=prompt)) for prompt in range(200)}
    left = SLOTS[SLOTS != 7]
    for prompt, home in homes.items():
        now = policy.pick(candidates(prompt=prompt, slots=left))
        assert now == home if home != 7 else now != 7


def test_affinity_has_a_bound() -> None:
    policy, load = make_policy("prefix-affinity"), [0] * 20
    for _ in range(2000):  # all of them begin alike
        load[policy.pick(candidates(load=load))] += 1
    assert max(load) <= LOAD_BOUND * (100 + 1) + 1
    assert sum(load) == 2000


@pytest.mark.parametrize(
    "name",
    ["predicted", "least-loaded", "power-of-two", "round-robin", "random", "prefix-affinity"],
)
@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "adaptive", "multiplexed"])
def test_every_policy_works_in_every_mode_and_predicts(name: str, mode: str) -> None:
    nodes = Nodes(mode, name, p=3, d=3)  # type: ignore[arg-type]
    for _ in range(20):
        placement = nodes.send(100).placement
        assert placement.decode is not None
        if placement.side == "pair" or mode != "adaptive":
            assert placement.decode.role is NodeRole.DECODE
        assert placement.ttft_s > 0
        assert placement.tpot_s > 0
        assert (placement.prefill is None) == (placement.side == "local")
