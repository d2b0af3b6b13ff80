"""Prompts prefilled beside streams: co-located serving with chunks that fit the streams' TPOT."""

from functools import cache

import pytest

from pdserve.commands.simulation.call import Call
from pdserve.protocol import Prompt, Slo
from pdserve.settings.config import DecodePolicyName, PolicyConfig
from tests.simulation.machines import ONE_CORE_25M
from tests.simulation.scenarios import colocated, disaggregated
from tests.simulation.score import Score, keeps_tpot, keeps_ttft
from tests.simulation.workload import calls, fixed, lognormal, merged, poisson, uniform

TPOT_S = 0.06


def chats_and_documents() -> list[Call]:
    """Make streams with a tight TPOT and, now and then, a prompt of four thousand tokens."""
    chat = Slo(name="chat", ttft_s=3.0, tpot_s=TPOT_S)
    document = Slo(name="chat", ttft_s=6.0, tpot_s=TPOT_S)
    answer = lognormal(150, 0.5, 500)
    return merged(
        calls("c", poisson(2.0, 60, seed=1), lognormal(400, 0.6, 1500), answer, chat),
        calls("l", poisson(0.25, 60, seed=2), uniform(3500, 4500), fixed(20), document),
    )


@cache
def with_chunks(policy: DecodePolicyName, chunk: int) -> Score:
    config = PolicyConfig(decode_policy=policy, local_chunk=chunk)
    return colocated(chats_and_documents(), config).score


def test_chunks_that_fit_the_promise_keep_gaps_below_it():
    tuned = with_chunks("tpot-cap", 0)
    assert tuned.gap_s(99) < 0.95 * TPOT_S
    assert tuned.tpot_attainment == 1.0
    assert tuned.ttft_attainment > 0.98


def test_one_budget_for_all_steps_makes_streams_stall():
    whole_budget, half_of_it = with_chunks("max-batch", 0), with_chunks("max-batch", 512)
    tuned = with_chunks("tpot-cap", 0)
    assert whole_budget.gap_s(99) > 3 * tuned.gap_s(99)
    assert half_of_it.gap_s(99) > 1.5 * tuned.gap_s(99)


def test_a_budget_small_enough_for_the_promise_makes_prompts_wait():
    """Sarathi uses one budget for all steps: small, so that it fits beside the fullest batch."""
    small, tuned = with_chunks("max-batch", 128), with_chunks("tpot-cap", 0)
    assert small.gap_s(99) < TPOT_S
    assert tuned.mean_ttft_s < 0.8 * small.mean_ttft_s
    assert tuned.ttft_s(99) < 0.8 * small.ttft_s(99)


def test_a_prompt_behind_much_context_gets_on_only_as_streams_have_time_in_hand():
    """Behind a long context, even 16 more tokens more than double a step.

    The TPOT allows steps of 1.7 times their normal length, on average.
    """
    tpot_s = 1.7 * ONE_CORE_25M.perf().decode_s(1, 400)
    relaxed, urgent = (Slo(name="a", ttft_s=ttft_s, tpot_s=tpot_s) for ttft_s in (8.0, 0.5))
    load = merged(
        calls("l", [0.0], fixed(4096), fixed(2), relaxed),
        calls("s", [0.7], fixed(100), fixed(60), urgent),
    )
    document, stream = colocated(load, PolicyConfig(), ONE_CORE_25M).score.outcomes
    assert keeps_ttft(stream)
    assert keeps_tpot(stream)
    assert keeps_ttft(document)


def test_another_machine_for_prompts_keeps_gaps_even_shorter():
    """With twice the machines, streams are not affected by prompts at all."""
    apart = disaggregated(chats_and_documents(), PolicyConfig(decode_policy="tpot-cap")).score
    assert apart.gap_s(99) < 0.7 * with_chunks("tpot-cap", 0).gap_s(99)


@pytest.mark.parametrize("last", [0, 7])
def test_a_call_ends_whatever_its_prompt_ends_with(last):
    """Its answer is made of that token; if it was the stop token, the call never ended."""
    (outcome,) = colocated([Call("c", 0.0, Prompt([5, last]), 9)], PolicyConfig()).score.outcomes
    assert len(outcome.token_times_s) == 9
