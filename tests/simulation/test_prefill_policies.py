"""Prefill policies on one node: each beats first come, first served in its intended case."""

from typing import get_args

import pytest

from pdserve.commands.simulation.call import Call
from pdserve.protocol import Slo
from pdserve.settings.config import PrefillPolicyName
from tests.matrix import matrix
from tests.simulation.machines import A100_13B
from tests.simulation.scenarios import Run, prefill_only, prefill_policy
from tests.simulation.workload import calls, fixed, lognormal, merged, poisson, uniform

LONG = 6000  # tokens


def is_long(call: Call) -> bool:
    return call.prompt.num_tokens >= LONG


def is_long_prompt(call: Call) -> bool:
    return call.prompt.num_tokens >= LONG // 2


def heavy_tail(per_s: float) -> list[Call]:
    """Most prompts are short, a few very long; there are no targets."""
    return calls("tail", poisson(per_s, 100, seed=1), lognormal(1000, 1.1, 16000), fixed(1))


def mixed_promises(per_s: float) -> list[Call]:
    """Short prompts with tight targets and long ones with loose targets, in one class."""
    urgent, relaxed = Slo(name="a", ttft_s=0.6), Slo(name="a", ttft_s=8.0)
    return merged(
        calls("u", poisson(0.8 * per_s, 100, seed=2), uniform(200, 800), fixed(1), urgent),
        calls("r", poisson(0.2 * per_s, 100, seed=3), uniform(3000, 6000), fixed(1), relaxed),
    )


# ---- shortest first ----------------------------------------------------------------------------


def test_shortest_first_shortens_the_mean_wait_when_a_few_prompts_are_very_long():
    load = heavy_tail(3.2)
    fcfs = prefill_only(load, prefill_policy("fcfs-budget")).score
    sjf = prefill_only(load, prefill_policy("sjf-aging")).score
    assert sjf.mean_ttft_s < 0.7 * fcfs.mean_ttft_s
    assert sjf.ttft_s(50) < 0.4 * fcfs.ttft_s(50)


@pytest.mark.long
def test_shortest_first_starves_nobody_even_when_short_prompts_never_stop_coming():
    """Short prompts alone exceed the node's capacity; a long one comes now and then."""
    load = merged(
        calls("short", poisson(24, 60, seed=4), uniform(300, 600), fixed(1)),
        calls("long", [2.0, 8.0, 14.0], fixed(12000), fixed(1)),
    )
    fcfs = prefill_only(load, prefill_policy("fcfs-budget")).score
    sjf = prefill_only(load, prefill_policy("sjf-aging")).score
    assert max(outcome.token_times_s[0] for outcome in sjf.outcomes) > 70, "it is an overload"
    # A prompt that comes more than half a TTFT later goes behind it; without a target, 30 s count
    # as the TTFT.
    assert sjf.where(is_long).ttft_s(100) < fcfs.where(is_long).ttft_s(100) + 30


# ---- slack -------------------------------------------------------------------------------------


def test_least_slack_keeps_mixed_promises_near_saturation():
    load = mixed_promises(5)
    fcfs = prefill_only(load, prefill_policy("fcfs-budget")).score
    edf = prefill_only(load, prefill_policy("edf-slack")).score
    assert fcfs.ttft_attainment < 0.7
    assert edf.ttft_attainment > 0.98


@pytest.mark.long
@pytest.mark.parametrize("times", matrix([2.0, 1.5], 1))
def test_least_slack_does_not_collapse_in_an_overload(times):
    """With the same target for all, plain EDF is first come, first served."""
    capacity = 8.6  # prompts of 1000 tokens a second
    load = calls(
        "o", poisson(times * capacity, 60, seed=5), uniform(500, 1500), fixed(1), Slo(ttft_s=2.0)
    )
    plain = prefill_only(load, prefill_policy("fcfs-budget")).score
    hopeless_last = prefill_only(load, prefill_policy("edf-slack")).score
    assert plain.ttft_attainment < 0.15
    assert hopeless_last.ttft_attainment > 0.85 / times


def test_least_slack_serves_the_late_ones_too():
    load = calls("o", poisson(12, 40, seed=5), uniform(500, 1500), fixed(1), Slo(ttft_s=2.0))
    score = prefill_only(load, prefill_policy("edf-slack")).score
    during = [o for o in score.outcomes if o.ttft_s > 4 and o.token_times_s[0] < 40]
    assert len(during) > 5, "a small share of the time is theirs while the overload lasts"


# ---- chunks ------------------------------------------------------------------------------------


def behind_a_long_prompt(chunk: int) -> Run:
    load = [
        *calls("long", [0.0], fixed(16384), fixed(1), Slo(name="a", ttft_s=20.0)),
        *calls("short", [0.5], fixed(500), fixed(1), Slo(name="a", ttft_s=0.6)),
    ]
    return prefill_only(load, prefill_policy("edf-slack", chunk))


def test_a_long_prompt_gives_way_between_chunks():
    long_s = A100_13B.perf().prefill_s(16384, 0, A100_13B.token_budget)
    score = behind_a_long_prompt(1024).score
    assert long_s > 3, "the short prompt comes while it is computed"
    assert score.ttft_attainment == 1.0
    assert score.where(is_long).mean_ttft_s < 1.2 * long_s


def test_a_long_prompt_does_not_give_way_to_whoever_came_later_under_first_come_first_served():
    load = [
        *calls("long", [0.0], fixed(16384), fixed(1)),
        *calls("short", [0.5], fixed(500), fixed(1)),
    ]
    score = prefill_only(load, prefill_policy("fcfs-budget")).score
    first, second = (outcome.token_times_s[0] for outcome in score.outcomes)
    assert first < second


def test_a_prompt_of_higher_priority_goes_between_the_chunks_of_a_lower_one():
    """Under every policy, since priority comes before its order."""
    load = [
        *calls("long", [0.0], fixed(16384), fixed(1), Slo(name="batch")),
        *calls("short", [0.5], fixed(500), fixed(1), Slo(name="interactive", priority=2)),
    ]
    for name in get_args(PrefillPolicyName):
        score = prefill_only(load, prefill_policy(name)).score
        assert score.of_class("interactive").mean_ttft_s < 0.6


# ---- buckets -----------------------------------------------------------------------------------


def test_buckets_keep_short_prompts_out_of_long_ones_steps():
    """Buckets are served in the order of the earliest deadline at their heads.

    Padding is free with these costs, so only this order matters. It helps when targets grow with
    lengths, as `edf-slack` does.
    """
    load = mixed_promises(5)
    fcfs = prefill_only(load, prefill_policy("fcfs-budget")).score
    buckets = prefill_only(load, prefill_policy("buckets")).score
    assert buckets.ttft_attainment > fcfs.ttft_attainment + 0.25


@pytest.mark.long
def test_buckets_change_nothing_when_prompts_are_about_equal():
    load = calls("e", poisson(8, 60, seed=6), uniform(600, 1000), fixed(1), Slo(ttft_s=2.0))
    fcfs = prefill_only(load, prefill_policy("fcfs-budget")).score
    buckets = prefill_only(load, prefill_policy("buckets")).score
    assert buckets.mean_ttft_s == pytest.approx(fcfs.mean_ttft_s, rel=0.1)


# ---- short and long prompts apart --------------------------------------------------------------


def test_short_prompts_apart_from_long_ones_are_sooner_there_and_break_fewer_promises():
    """The claims of LAPS: a third less of prefill latency, 12 to 28 % fewer broken promises."""
    load = merged(
        calls("s", poisson(12, 100, seed=7), uniform(30, 200), fixed(1), Slo(name="a", ttft_s=0.4)),
        calls(
            "l", poisson(0.7, 100, seed=8), uniform(3000, 6000), fixed(1), Slo(name="a", ttft_s=4.0)
        ),
    )
    fcfs = prefill_only(load, prefill_policy("fcfs-budget")).score
    apart = prefill_only(load, prefill_policy("laps")).score
    assert apart.mean_ttft_s < 0.7 * fcfs.mean_ttft_s
    assert 1 - apart.ttft_attainment < 0.8 * (1 - fcfs.ttft_attainment)
    assert apart.where(is_long_prompt).ttft_s(100) < 1.5 * fcfs.where(is_long_prompt).ttft_s(100)


# ---- the prefix cache --------------------------------------------------------------------------


def test_a_long_prompt_that_is_cached_counts_as_short():
    """A conversation of 12k tokens continues while a new prompt of 6k waits: 500 are uncached."""
    load = [
        *calls("warm", [0.0], fixed(64), fixed(1), prefixes=[12000]),
        *calls("blocker", [10.0], fixed(2000), fixed(1)),
        *calls("fresh", [10.01], fixed(6000), fixed(1)),
        *calls("warm", [0.0, 10.02], fixed(500), fixed(1), prefixes=[12000])[1:],
    ]
    score = prefill_only(load, prefill_policy("sjf-aging")).score
    ends = {outcome.call.call_id: outcome.token_times_s[0] for outcome in score.outcomes}
    assert ends["warm-1"] < ends["fresh-0"]


# ---- the performance model ---------------------------------------------------------------------


@pytest.mark.long  # decode steps are corrected by default
def test_the_right_order_does_not_depend_on_the_machine_being_as_fast_as_it_was_thought_to_be():
    """The steps themselves correct a profile that is wrong by a factor of two."""
    load = mixed_promises(4.8)
    for wrong_by in (0.5, 2.0):
        run = prefill_only(
            load, prefill_policy("edf-slack"), believed=A100_13B.perf(wrong_by=wrong_by)
        )
        assert run.node.perf.prefill_ratio == pytest.approx(1 / wrong_by, rel=0.05)
        assert run.score.ttft_attainment > 0.97
