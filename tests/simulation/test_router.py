"""The real router over a fleet: each policy beats its baseline in what users see."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from coordinator.routing.loads.decode import DecodeLoad
from coordinator.routing.outlook import Outlook
from pdserve.protocol import Prompt, Slo, TransferCosts
from pdserve.settings.config import PolicyConfig, RouterName
from tests.matrix import matrix
from tests.simulation.machines import A100_13B
from tests.simulation.scenarios import fleet, prefill_policy
from tests.simulation.score import Score
from tests.simulation.workload import calls, fixed, lognormal, poisson, uniform

IN_ORDER = prefill_policy("fcfs-budget")  # so that nothing but the router decides
SLO = Slo(name="a", ttft_s=1.0)


@cache
def uneven(router: RouterName) -> Score:
    """Eight prefill nodes; prompts from a hundred tokens to sixteen thousand."""
    length = lognormal(600, 1.2, 16000)
    load = calls("r", poisson(28, 30, seed=1), length, fixed(1), SLO, most_output=1)
    return fleet(8, 0, "disaggregated", load, IN_ORDER, router=router).score


@cache
def shared(router: RouterName) -> Score:
    """Serve prompts that mostly consist of one of 64 shared prefixes.

    A node can hold some twenty of these; the network is slow.
    """
    machine = replace(
        A100_13B,
        num_kv_tokens=64 * 1024,
        transfer=TransferCosts(transport="tcp", fixed_s=0.005, bytes_per_s=1.2e9),
    )
    own = lognormal(300, 0.8, 3000)
    times = poisson(24, 30, seed=1)
    load = calls("r", times, own, fixed(1), SLO, prefixes=[3000] * 64, most_output=1)
    return fleet(8, 0, "disaggregated", load, IN_ORDER, machine, router=router).score


OTHERS = ["round-robin", "random", "least-loaded", "power-of-two"]


@pytest.mark.parametrize("other", matrix(OTHERS, 1))
def test_prediction_is_best_for_uneven_prompts(other: RouterName):
    assert uneven("predicted").mean_ttft_s < 0.95 * uneven(other).mean_ttft_s
    assert uneven("predicted").ttft_attainment >= uneven(other).ttft_attainment


@pytest.mark.long
@pytest.mark.parametrize("other", matrix(OTHERS, 1))
def test_prediction_is_far_better_where_prompts_begin_alike(other: RouterName):
    assert shared("predicted").mean_ttft_s < 0.2 * shared(other).mean_ttft_s
    assert shared("predicted").hit_rate > 2 * shared(other).hit_rate


@pytest.mark.long
def test_prediction_balances_hits_against_queues_better_than_affinity():
    assert shared("predicted").mean_ttft_s < 0.8 * shared("prefix-affinity").mean_ttft_s


@pytest.mark.long
def test_a_choice_of_two_is_much_better_than_one():
    assert uneven("power-of-two").mean_ttft_s < 0.6 * uneven("random").mean_ttft_s
    assert uneven("power-of-two").ttft_s(99) < 0.8 * uneven("random").ttft_s(99)


@pytest.mark.long
def test_affinity_finds_prefixes_without_knowing_of_caches():
    assert shared("prefix-affinity").hit_rate > 2 * shared("round-robin").hit_rate
    assert shared("prefix-affinity").mean_ttft_s < 0.3 * shared("round-robin").mean_ttft_s


@pytest.mark.long  # in test_policies.py of routing it is by default
def test_affinity_keeps_loads_within_their_bound():
    """Half of all calls begin with the same system prompt."""
    times = poisson(24, 30, seed=1)
    prefixes = [3000] * 7 + [3000]
    load = calls("r", times, lognormal(300, 0.8, 3000), fixed(1), SLO, prefixes, 1)
    shared = Prompt(load[0].prompt.token_ids[:3000])
    popular = [replace(c, prompt=shared.then(c.prompt.token_ids[3000:])) for c in load]
    load = [both[number % 2] for number, both in enumerate(zip(load, popular, strict=True))]
    run = fleet(8, 0, "disaggregated", load, IN_ORDER, router="prefix-affinity")
    busy = [node.busy_s for node in run.nodes]
    assert max(busy) < 2 * sum(busy) / len(busy)


# ---- foresight ---------------------------------------------------------------------------------


def overloaded() -> tuple[float, float]:
    """Return (goodput, swings) of two pools at twice their capacity, with admission.

    Swings: standard deviation, over time, of the number of requests that decode or wait for it.
    """
    slo = Slo(name="a", ttft_s=10.0, tpot_s=0.05)
    load = calls("o", poisson(10, 40, seed=1), uniform(1500, 2500), lognormal(150, 0.4, 400), slo)
    large_batches = PolicyConfig(decode_policy="max-batch")
    run = fleet(2, 2, "disaggregated", load, large_batches, admission=True)
    changes = sorted(
        change
        for outcome in run.score.served
        for change in ((outcome.token_times_s[0], 1), (outcome.token_times_s[-1], -1))
    )
    levels = np.cumsum([step for _, step in changes])
    is_steady = [10 < at_s < 40 for at_s, _ in changes]
    return run.score.goodput, float(np.std(levels[is_steady]))


@pytest.mark.long
def test_pools_swing_when_load_is_taken_as_it_is_now(monkeypatch: pytest.MonkeyPatch):
    """During a prefill, a decode node that is empty now fills up (Mooncake)."""
    goodput, swings = overloaded()
    paces_s = Outlook.paces_s
    monkeypatch.setattr(
        Outlook, "paces_s", lambda self, in_s, full_s=0.0: paces_s(self, 0.0, full_s)
    )
    in_batches = "_active", "others"  # requests being decoded, without those on their way
    monkeypatch.setattr(
        DecodeLoad, "legs_with_others", lambda self: sum(getattr(self, name) for name in in_batches)
    )
    goodput_of_now, swings_of_now = overloaded()
    assert swings < 0.85 * swings_of_now
    assert goodput > 1.05 * goodput_of_now
