"""Decode policies on one node that receives prefilled prompts."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pytest

from pdserve.commands.simulation.call import Call
from pdserve.engine.kv.shortage import Victims
from pdserve.engine.request import Request
from pdserve.protocol import Slo
from tests.matrix import matrix
from tests.simulation.machines import A100_13B
from tests.simulation.scenarios import decode_only, decode_policy
from tests.simulation.workload import calls, lognormal, merged, poisson, uniform

PROMPT = lognormal(1000, 0.8, 4000)
ANSWER = lognormal(150, 0.5, 600)

# Few and small blocks, which streams soon outgrow.
LITTLE_MEMORY = replace(A100_13B, num_kv_tokens=16 * 1024, block_size=16)


def chats(per_s: float, tpot_s: float = 0.06) -> list[Call]:
    slo = Slo(name="chat", tpot_s=tpot_s)
    return calls("d", poisson(per_s, 60, seed=1), PROMPT, ANSWER, slo)


def essays(per_s: float) -> list[Call]:
    """Short prompts, long answers: their KV grows to several times its size."""
    slo = Slo(name="essay", tpot_s=0.05)
    times = poisson(per_s, 60, seed=3)
    return calls("h", times, uniform(100, 300), lognormal(600, 0.5, 2000), slo)


# ---- the size of the batch ---------------------------------------------------------------------


@pytest.mark.long
def test_a_batch_no_larger_than_promises_allow_keeps_them_under_load():
    """More calls arrive than can be served in time: a large batch makes all of them late."""
    largest = decode_only(chats(4.5), decode_policy("max-batch")).score
    capped = decode_only(chats(4.5), decode_policy("tpot-cap")).score
    assert capped.tpot_attainment > largest.tpot_attainment + 0.2
    assert capped.tokens_per_s > 0.85 * largest.tokens_per_s


@pytest.mark.long
def test_the_cap_costs_nothing_when_there_is_little_to_do():
    largest = decode_only(chats(2), decode_policy("max-batch")).score
    capped = decode_only(chats(2), decode_policy("tpot-cap")).score
    assert capped.tpot_attainment == largest.tpot_attainment == 1.0
    assert capped.tokens_per_s == pytest.approx(largest.tokens_per_s, rel=0.02)


@pytest.mark.parametrize("wrong_by", matrix([0.5, 2.0], 1))
def test_steps_stay_below_the_cap_even_with_a_wrong_profile(wrong_by: float):
    """Predictions are corrected by measured steps, whether the profile was too slow or too fast."""
    run = decode_only(
        chats(4), decode_policy("tpot-cap"), believed=A100_13B.perf(wrong_by=wrong_by)
    )
    assert run.node.perf.decode_ratio == pytest.approx(1 / wrong_by, rel=0.05)
    assert run.score.gap_s(95) < 0.06


@pytest.mark.long
def test_relaxed_streams_skip_steps_for_tight_ones():
    tight, relaxed = Slo(name="tight", tpot_s=0.04), Slo(name="relaxed", tpot_s=0.2)
    load = merged(
        calls("t", poisson(1.9, 60, seed=1), PROMPT, ANSWER, tight),
        calls("l", poisson(1.9, 60, seed=2), PROMPT, ANSWER, relaxed),
    )
    scores = {
        name: decode_only(load, decode_policy(name)).score
        for name in ("max-batch", "tpot-cap", "slack-batch")
    }
    assert scores["slack-batch"].attainment > scores["max-batch"].attainment + 0.1
    assert scores["slack-batch"].attainment > scores["tpot-cap"].attainment + 0.1
    assert scores["slack-batch"].of_class("relaxed").tpot_attainment > 0.98


@pytest.mark.long
def test_short_answers_that_join_first_keep_more_promises_where_places_are_few():
    """Each kind is expected to be as long as it usually is."""
    slo, usual = Slo(name="a", tpot_s=0.06), {"s": 35, "l": 650}
    load = merged(
        calls("s", poisson(2.8, 120, seed=1), uniform(300, 800), uniform(10, 60), slo),
        calls("l", poisson(1.2, 120, seed=2), uniform(300, 800), uniform(400, 900), slo),
    )
    few_places = replace(A100_13B, max_batch_size=32)
    scores = [
        decode_only(
            load, decode_policy(name), few_places, expected=lambda call: usual[call.call_id[0]]
        ).score
        for name in ("tpot-cap", "shortest-remaining")
    ]
    in_turn, shortest = scores
    assert 1 - shortest.attainment < 0.8 * (1 - in_turn.attainment)
    longest_s = [max(o.token_times_s[-1] - o.call.at_s for o in score.served) for score in scores]
    assert longest_s[1] < 1.2 * longest_s[0], "long ones do not starve"


@pytest.mark.long
def test_batches_that_run_to_their_end_lose_to_those_made_anew_at_each_step():
    static = decode_only(chats(3), decode_policy("static")).score
    continuous = decode_only(chats(3), decode_policy("max-batch")).score
    assert continuous.tpot_attainment > static.tpot_attainment + 0.5
    assert continuous.tokens_per_s > 1.1 * static.tokens_per_s


# ---- room to grow ------------------------------------------------------------------------------


@pytest.mark.long
def test_room_to_grow_saves_preemptions():
    runs = {
        name: decode_only(essays(2), decode_policy("max-batch", name), LITTLE_MEMORY)
        for name in ("greedy", "reserve-dynamic", "reserve-static")
    }
    lost = {name: run.node.core.queues.preemptions.statistics for name, run in runs.items()}
    stalled = {name: run.score.stalled_share(0.5) for name, run in runs.items()}
    assert lost["greedy"].for_blocks > 15
    assert stalled["greedy"] > 0.1, "answers stand still in the middle"
    assert lost["reserve-dynamic"].for_blocks < 0.25 * lost["greedy"].for_blocks
    assert lost["reserve-dynamic"].computed_tokens < 0.25 * lost["greedy"].computed_tokens
    assert stalled["reserve-dynamic"] < 0.25 * stalled["greedy"]
    assert lost["reserve-static"].for_blocks == 0
    # reserve-static keeps half of the memory empty for this; reserve-dynamic does not.
    greedy = runs["greedy"].score.tokens_per_s
    assert runs["reserve-dynamic"].score.tokens_per_s > 0.9 * greedy
    assert runs["reserve-static"].score.tokens_per_s < 0.7 * greedy


class YoungestVictim(Victims):
    """Preempts the youngest request, as vLLM does."""

    def choose(self, running: Iterable[Request], needy: Request) -> Request:
        streams = [request for request in running if request.leg_token_limit is None]
        return max(streams, key=lambda request: request.lifecycle.received_s)


def test_a_victim_with_time_in_hand_misses_nothing():
    tight, relaxed = Slo(name="a", tpot_s=0.04), Slo(name="a", tpot_s=0.2)
    load = merged(
        calls("h", poisson(0.6, 60, seed=3), uniform(100, 300), lognormal(600, 0.5, 2000), tight),
        calls("i", poisson(0.6, 60, seed=4), uniform(100, 300), lognormal(600, 0.5, 2000), relaxed),
    )
    policy = decode_policy("max-batch", "greedy")
    slack = decode_only(load, policy, LITTLE_MEMORY).score
    youngest = decode_only(load, policy, LITTLE_MEMORY, victims=YoungestVictim()).score
    assert slack.tpot_attainment > youngest.tpot_attainment
    assert slack.stalled_share(0.5) < 0.3 * youngest.stalled_share(0.5)


# ---- priority ----------------------------------------------------------------------------------


def test_the_more_important_take_the_place_of_the_less_important():
    def load(priority: int) -> list[Call]:
        batch = Slo(name="batch")
        urgent = Slo(name="batch", priority=priority, tpot_s=0.05)  # of the same payer
        return merged(
            calls("b", poisson(3, 40, seed=3), PROMPT, lognormal(300, 0.5, 1000), batch),
            calls("i", poisson(0.5, 40, seed=4), PROMPT, lognormal(100, 0.5, 400), urgent),
        )

    def is_urgent(call: Call) -> bool:
        return call.call_id.startswith("i")

    machine = replace(A100_13B, num_kv_tokens=32 * 1024)
    equal = decode_only(load(0), decode_policy("tpot-cap"), machine)
    above = decode_only(load(2), decode_policy("tpot-cap"), machine)
    assert above.score.where(is_urgent).tpot_attainment == 1.0
    assert equal.score.where(is_urgent).tpot_attainment < 0.8
    assert above.node.core.queues.preemptions.statistics.for_priority > 0


@pytest.mark.long
def test_nobody_is_preempted_among_equals_for_priority():
    load = [
        replace(call, slo=msgspec.structs.replace(call.slo, priority=1)) for call in essays(1.5)
    ]
    run = decode_only(load, decode_policy("tpot-cap"), LITTLE_MEMORY)
    assert run.node.core.queues.preemptions.statistics.for_priority == 0
