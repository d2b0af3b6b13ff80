"""A flood from one tenant, or of one class, does not harm the others."""

from functools import cache

import pytest

from coordinator.admission.policy import OUTPUT_COST
from pdserve.commands.simulation.call import Call
from pdserve.protocol import Slo
from pdserve.settings.config import Mode, PolicyConfig, PrefillPolicyName
from tests.matrix import matrix
from tests.simulation.compare_floods import (
    FLOOD,
    HAS_BEGUN_S,
    NODES,
    PAYERS,
    POLICY,
    is_alices,
    is_later,
    replay,
)
from tests.simulation.machines import ONE_CORE_25M
from tests.simulation.scenarios import fleet
from tests.simulation.score import Score, gaps_s
from tests.simulation.workload import calls, fixed, lognormal, merged, poisson

ROBBED = 1.2  # times the TTFT without the flood
SEEDS = (13, 14)


def two_tenants(flood: float, priority: int, slo: tuple[float, float]) -> list[Call]:
    """Both send calls at the same rate, until Bob sends `flood` times as many."""
    ttft_s, tpot_s = slo
    alice = Slo(name="alice", ttft_s=ttft_s, tpot_s=tpot_s, priority=priority)
    bob = Slo(name="bob", ttft_s=ttft_s, tpot_s=tpot_s)
    prompt, answer = lognormal(600, 0.7, 3000), lognormal(20, 0.5, 60)
    return merged(
        calls("alice", poisson(2.0, 40, seed=1), prompt, answer, alice),
        calls("bob", poisson(2.0 * flood, 40, seed=2), prompt, answer, bob),
    )


@cache
def alice(policy: PrefillPolicyName, flood: float, priority: int, admission: bool) -> Score:
    config = PolicyConfig(prefill_policy=policy, decode_policy="tpot-cap")
    load = two_tenants(flood, priority, (2.0, 0.1))
    run = fleet(1, 1, "disaggregated", load, config, admission=admission)
    return run.score.of_class("alice")


@pytest.mark.parametrize("policy", matrix(["fcfs-budget", "sjf-aging", "edf-slack"], 1))
def test_a_flood_of_equals_delays_the_other_by_less_than_a_fifth(policy: PrefillPolicyName):
    """Bob's 10x are four times what one prefill node can do; only his calls are refused."""
    calm, flooded = alice(policy, 1, 0, True), alice(policy, 10, 0, True)
    assert flooded.ttft_s(99) < ROBBED * calm.ttft_s(99)
    assert flooded.attainment > 0.95


@pytest.mark.long  # one of equals does not by default
@pytest.mark.parametrize("policy", matrix(["fcfs-budget", "edf-slack"], 1))
def test_a_flood_from_below_does_not_reach_the_ones_above(policy: PrefillPolicyName):
    calm, flooded = alice(policy, 1, 1, True), alice(policy, 10, 1, True)
    assert flooded.ttft_s(99) < ROBBED * max(calm.ttft_s(99), 0.5)
    assert flooded.attainment > 0.98


@pytest.mark.long  # with admission they do by default
def test_shares_hold_on_the_nodes_alone():
    """No call is refused: Bob's calls queue up, and Alice's do not queue behind them."""
    calm, flooded = alice("edf-slack", 1, 0, False), alice("edf-slack", 4, 0, False)
    assert flooded.ttft_s(99) < ROBBED * calm.ttft_s(99)
    assert flooded.attainment > 0.98


@pytest.mark.long  # in one mode by default
@pytest.mark.parametrize("mode", matrix(NODES, 1))
@pytest.mark.parametrize("payers", matrix([(each,) for each in PAYERS.values()], 1), ids=PAYERS)
def test_a_flood_of_an_equal_does_not_delay_another_in_any_mode(
    payers: tuple[Slo, Slo], mode: Mode
):
    calm, flooded = (replay(payers, mode, times, SEEDS).where(is_later) for times in (1, FLOOD))
    alice_calm, alice_flooded = (score.where(is_alices) for score in (calm, flooded))
    assert alice_flooded.ttft_s(99) < ROBBED * alice_calm.ttft_s(99)
    assert alice_flooded.attainment > 0.99
    assert flooded.goodput > 2 * calm.goodput, "what is free is Bob's, and kept in time"


@pytest.mark.long
def test_a_flood_delays_another_little_in_its_first_seconds():
    """Nobody has a history yet, but Bob has more prompts waiting.

    The slowest of Alice's calls take three fifths longer; by service alone, twice as long.
    """
    payers, seeds = PAYERS["class"], range(1, 37)
    calm, flooded = (
        replay(payers, "colocated", times, seeds, HAS_BEGUN_S).where(is_alices)
        for times in (1, FLOOD)
    )
    assert flooded.ttft_s(99) < 1.75 * calm.ttft_s(99)
    assert flooded.attainment == 1.0


@pytest.mark.parametrize("mode", matrix(NODES, 1))
def test_long_answers_that_fill_all_places_do_not_shut_an_equal_out(mode: Mode):
    """Alice's answers fill all 64 places of each node, and more wait; they take many seconds."""
    num_prefill, num_decode = NODES[mode]
    alice, bob = (Slo(name="standard", tenant=name) for name in ("alice", "bob"))
    load = merged(
        calls("alice", [0.0] * 80 * (num_prefill + num_decode), fixed(50), fixed(300), alice),
        calls("bob", [2.0 + 0.2 * i for i in range(10)], fixed(50), fixed(20), bob),
    )
    run = fleet(num_prefill, num_decode, mode, load, POLICY, ONE_CORE_25M)
    of_bob = run.score.where(lambda call: call.slo.tenant == "bob").served
    assert len(of_bob) == 10
    assert max(outcome.ttft_s for outcome in of_bob) < 0.5
    assert max(max(gaps_s(outcome)) for outcome in of_bob) < 0.5


@pytest.mark.long  # those with promises do by default
def test_tenants_without_promises_share_the_line_by_weight():
    """Both exceed the capacity, and wait in the coordinator."""
    batch = [Slo(name="batch", tenant=t, weight=w) for t, w in (("alice", 2.0), ("bob", 1.0))]
    prompt, answer = lognormal(600, 0.7, 3000), lognormal(20, 0.5, 60)
    load = merged(
        *(calls(s.tenant, poisson(12, 40, seed=7), prompt, answer, s) for s in batch),
    )
    score = fleet(1, 1, "disaggregated", load, POLICY, admission=True).score
    assert score.num_refused == 0
    assert cost_until(score, "alice", 40) / cost_until(score, "bob", 40) == pytest.approx(
        2.0, rel=0.05
    )


def cost_until(score: Score, tenant: str, end_s: float) -> float:
    """Return the tokens given to a tenant until then, as the waiting line counts them."""
    done = [
        o.call
        for o in score.outcomes
        if o.call.slo.tenant == tenant and o.token_times_s[-1] < end_s
    ]
    return sum(call.prompt.num_tokens + OUTPUT_COST * call.num_output for call in done)


@pytest.mark.long  # on nodes alone they do by default
def test_shares_go_by_weight():
    """Both exceed the capacity; three quarters of it are Alice's."""
    prompt, answer = lognormal(600, 0.7, 3000), lognormal(2, 0.1, 4)
    shares = {}
    load = merged(
        calls("a", poisson(16, 20, seed=1), prompt, answer, Slo(name="alice", weight=3.0)),
        calls("b", poisson(16, 20, seed=2), prompt, answer, Slo(name="bob", weight=1.0)),
    )
    config = PolicyConfig(prefill_policy="fcfs-budget")
    score = fleet(1, 1, "disaggregated", load, config).score
    for name in ("alice", "bob"):
        done = [o for o in score.of_class(name).outcomes if o.token_times_s[0] < 20]
        shares[name] = sum(outcome.call.prompt.num_tokens for outcome in done)
    assert 2.5 < shares["alice"] / shares["bob"] < 3.5
