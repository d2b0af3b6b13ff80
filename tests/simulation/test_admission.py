"""Overload: refusing calls early keeps the others in time."""

from functools import cache

import pytest

from pdserve.commands.simulation.call import Call
from pdserve.protocol import Slo
from pdserve.settings.config import PolicyConfig
from tests.matrix import matrix
from tests.simulation.machines import ONE_CORE_25M
from tests.simulation.scenarios import fleet
from tests.simulation.score import Score, keeps_tpot, keeps_ttft
from tests.simulation.workload import calls, fixed, lognormal, merged, poisson

POLICY = PolicyConfig(prefill_policy="edf-slack", decode_policy="tpot-cap")
BASELINE = PolicyConfig(prefill_policy="fcfs-budget", decode_policy="max-batch")
CHAT = Slo(name="chat", ttft_s=2.0, tpot_s=0.06)
CAPACITY = 4.0  # calls a second that one prefill and one decode node serve in time
RATES = (1.0, 2.0)  # times the capacity


def chats(times_capacity: float) -> list[Call]:
    """Prompts of about 1000 tokens, answers of about 150."""
    times = poisson(times_capacity * CAPACITY, 30, seed=1)
    return calls("d", times, lognormal(1000, 0.8, 4000), lognormal(150, 0.5, 600), CHAT)


@cache
def served(times_capacity: float, policy: PolicyConfig, admission: bool) -> Score:
    load = chats(times_capacity)
    return fleet(1, 1, "disaggregated", load, policy, admission=admission).score


def test_goodput_at_twice_the_capacity_is_near_its_peak():
    goodput = {times: served(times, POLICY, True).goodput for times in RATES}
    assert goodput[2.0] > 0.9 * max(goodput.values())


@pytest.mark.long
def test_without_admission_goodput_collapses():
    """Everything is late at twice the capacity: first come, first served, in the largest batches.

    With the rest refused, the same policies serve as many calls in time as ever.
    """
    refusing, open_to_all = (served(2.0, BASELINE, admission) for admission in (True, False))
    assert open_to_all.goodput < 0.5 * served(0.75, BASELINE, False).goodput
    assert refusing.goodput > 0.9 * served(0.75, BASELINE, True).goodput
    assert refusing.goodput > 2.5 * open_to_all.goodput


@pytest.mark.long
def test_policies_that_put_the_hopeless_last_bear_an_overload_even_without_admission():
    refusing, open_to_all = (served(2.0, POLICY, admission) for admission in (True, False))
    assert open_to_all.goodput > 2.5 * served(2.0, BASELINE, False).goodput
    assert refusing.goodput > 0.8 * open_to_all.goodput


def test_whoever_is_admitted_is_served_in_time():
    for times in (1.0, 2.0):
        score = served(times, POLICY, True)
        in_time = [o for o in score.served if keeps_ttft(o) and keeps_tpot(o)]
        assert len(in_time) > 0.85 * len(score.served)


def test_nobody_is_refused_who_would_be_served_in_time_anyway():
    """At half of the capacity, every target is met without admission."""
    assert served(0.5, POLICY, False).attainment == 1.0
    assert served(0.5, POLICY, True).num_refused <= 0.02 * len(served(0.5, POLICY, True).outcomes)


@pytest.mark.long
def test_calls_without_a_promise_wait_and_all_end():
    """Batch work at twice the capacity costs interactive work at half of it less than a point."""
    batch = calls(
        "b", poisson(2 * CAPACITY, 15, seed=2), lognormal(1000, 0.8, 4000),
        lognormal(150, 0.5, 600), Slo(name="batch"),
    )  # fmt: skip
    chat = calls(
        "d", poisson(0.5 * CAPACITY, 40, seed=1), lognormal(1000, 0.8, 4000),
        lognormal(150, 0.5, 600), Slo(name="chat", ttft_s=2.0, tpot_s=0.06, priority=1),
    )  # fmt: skip
    load = sorted([*batch, *chat], key=lambda call: call.at_s)
    score = fleet(1, 1, "disaggregated", load, POLICY, admission=True).score
    assert score.of_class("batch").num_refused == 0
    alone = fleet(1, 1, "disaggregated", chat, POLICY, admission=True).score.attainment
    assert alone > 0.95
    assert score.of_class("chat").attainment > alone - 0.01
    assert len(score.of_class("batch").served) == len(batch)


@pytest.mark.long  # decode steps are corrected by default
@pytest.mark.parametrize("wrong_by", matrix([2.0, 0.5], 1))
def test_a_wrong_profile_is_corrected_before_it_costs_much(wrong_by: float):
    """Ratios in load reports correct it. Until then twice or half as many calls are admitted."""
    wrong = fleet(
        1, 1, "disaggregated", chats(1.5), POLICY, admission=True, wrong_by=wrong_by
    ).score
    assert wrong.goodput > 0.85 * served(1.5, POLICY, True).goodput


@pytest.mark.long  # two pools do not by default
@pytest.mark.parametrize("mode", matrix(["colocated", "adaptive"], 1))
def test_no_mode_collapses_in_an_overload(mode):
    def goodput(times: float) -> float:
        num_prefill = 1 if mode == "adaptive" else 0
        run = fleet(num_prefill, 2 - num_prefill, mode, chats(times), POLICY, admission=True)
        return run.score.goodput

    at_rates = {times: goodput(times) for times in (1.0, 2.0)}
    assert at_rates[2.0] > 0.9 * max(at_rates.values())


def test_a_long_prompt_is_not_refused_for_its_own_chunks():
    """Each chunk delays streams, but not its own request's, which begins after the last chunk."""
    slo = Slo(name="mixed", ttft_s=7.0, tpot_s=1.5 * ONE_CORE_25M.perf().decode_s(1, 100))
    chat = lognormal(96, 0.4, 256), lognormal(256, 0.3, 512)
    load = merged(
        calls("chat", poisson(1.6, 20, seed=3), *chat, slo, most_output=1),
        calls("long", poisson(0.2, 20, seed=4), fixed(4096), fixed(16), slo, most_output=1),
    )
    score = fleet(0, 2, "colocated", load, POLICY, ONE_CORE_25M, admission=True).score
    assert score.num_refused == 0
    assert score.attainment == 1.0
