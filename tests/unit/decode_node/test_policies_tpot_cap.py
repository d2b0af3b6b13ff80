"""`tpot-cap`: who may join a batch, and how large the chunks beside it are."""

from __future__ import annotations

import pytest

from decode_node.policies import DecodePolicy
from decode_node.policies.lent_time import MIN_CHUNK
from decode_node.policies.local_prompts import MOST_SKIPPED
from pdserve.lifecycle import Targets
from tests.fakes.runner import (
    decode_policy,
)
from tests.requests import make_request
from tests.unit.decode_node.batches import Batch, tokens_of


def tpot_cap(batch: Batch, **settings: object) -> DecodePolicy:
    return decode_policy(512, 64, "tpot-cap", batch.perf, batch.clock, **settings)


@pytest.mark.parametrize(("num_members", "fits"), [(8, True), (9, False)])
def test_a_request_joins_while_the_step_keeps_nine_tenths_of_the_tightest_promise(
    num_members: int, fits: bool
) -> None:
    batch = Batch()
    for _ in range(num_members):
        batch.decoding(tpot_s=1.0)
    newcomer = batch.waiting(3, tpot_s=0.020)  # 18 ms: 9 + 9 tokens
    policy = tpot_cap(batch)
    assert policy.has_place(batch.queues.streams, newcomer) is fits
    policy.plan(batch.queues)
    assert (newcomer in batch.queues.running) is fits


def test_the_limit_follows_the_measured_times() -> None:
    batch = Batch()
    batch.decoding(tpot_s=0.020)
    newcomer = batch.waiting(3, tpot_s=0.020)
    policy = tpot_cap(batch)
    assert policy.has_place(batch.queues.streams, newcomer)
    batch.perf.decode_ratio = 1.7  # 11 ms are 18.7 in truth
    assert not policy.has_place(batch.queues.streams, newcomer)


def test_what_is_on_its_way_here_counts_as_a_member() -> None:
    batch = Batch()
    batch.queues.arriving |= {make_request(3) for _ in range(9)}
    newcomer = batch.waiting(3, tpot_s=0.020)
    assert not tpot_cap(batch).has_place(batch.queues.streams, newcomer)


def test_without_promises_the_default_is_aimed_at() -> None:
    batch = Batch()
    for _ in range(26):
        batch.decoding()
    newcomer = batch.waiting(3)
    assert tpot_cap(batch, default_tpot_s=0.040).has_place(batch.queues.streams, newcomer)
    assert not tpot_cap(batch, default_tpot_s=0.039).has_place(batch.queues.streams, newcomer)


@pytest.mark.parametrize("default_tpot_s", [0.010, 0.015, 0.020])
def test_without_promises_a_step_may_take_twice_as_long_as_alone(default_tpot_s: float) -> None:
    """Else a node whose steps take nearly the default would serve one stream at a time."""
    batch = Batch()
    for _ in range(10):
        batch.decoding()
    newcomer, policy = batch.waiting(3), tpot_cap(batch, default_tpot_s=default_tpot_s)
    assert policy.has_place(batch.queues.streams, newcomer), "20 ms, where one has 10"
    batch.decoding()
    assert not policy.has_place(batch.queues.streams, newcomer)
    batch.decoding(tpot_s=0.012)
    assert not policy.has_place(batch.queues.streams[-1:], newcomer), "a promise is kept"


def test_a_request_alone_always_may() -> None:
    batch = Batch()
    newcomer = batch.waiting(3, tpot_s=0.001)
    policy = tpot_cap(batch)
    assert policy.has_place([], newcomer)
    assert tokens_of(newcomer, policy.plan(batch.queues)) == 3


def test_a_promise_that_nobody_could_keep_keeps_nobody_out() -> None:
    batch = Batch()
    hopeless = batch.decoding(tpot_s=0.001)
    newcomer = batch.waiting(3, tpot_s=0.5)
    assert tpot_cap(batch).has_place([hopeless], newcomer)


def test_the_batch_is_no_larger_than_a_step() -> None:
    batch = Batch()
    policy = decode_policy(512, 2, "tpot-cap", batch.perf, batch.clock)
    batch.decoding()
    second = batch.decoding()
    newcomer = batch.waiting(3)
    assert not policy.has_place(batch.queues.streams, newcomer)
    assert policy.has_place([second], newcomer)


# ---- chunks of prompts beside the decodes -------------------------------------------------------


def test_a_chunk_is_what_the_tightest_promise_leaves() -> None:
    batch = Batch()
    batch.decoding(tpot_s=0.100)
    batch.decoding(tpot_s=0.200)
    prompt = batch.begun(300)
    rows = tpot_cap(batch).plan(batch.queues)
    assert [row.num_tokens for row in rows] == [1, 1, 79]  # 9 + 81 ms, which is 0.9 x 100
    assert rows[-1].request is prompt


def test_a_chunk_shrinks_with_the_context_that_comes_before_it() -> None:
    batch = Batch()
    costs = batch.perf.costs
    batch.perf.costs = type(costs)(knot_tokens=costs.knot_tokens, knot_s=costs.knot_s, pair_s=1e-6)
    batch.decoding(tpot_s=0.100)
    prompt = batch.begun(600)
    policy = tpot_cap(batch)
    first = tokens_of(prompt, policy.plan(batch.queues))
    prompt.num_computed_tokens = 400
    assert MIN_CHUNK < tokens_of(prompt, policy.plan(batch.queues)) < first


def test_without_decodes_a_prompt_has_the_whole_budget() -> None:
    batch = Batch()
    prompt = batch.begun(2000, tpot_s=0.010)
    assert tokens_of(prompt, tpot_cap(batch).plan(batch.queues)) == 512


def test_a_prompt_that_has_begun_gets_on_whatever_was_promised() -> None:
    batch = Batch()
    for _ in range(20):
        batch.decoding(tpot_s=0.020)
    prompt = batch.begun(100)
    policy = tpot_cap(batch)
    given = [tokens_of(prompt, policy.plan(batch.queues)) for _ in range(2 * MOST_SKIPPED + 2)]
    assert given == 2 * [*[0] * MOST_SKIPPED, MIN_CHUNK]


def test_a_prompt_gets_on_as_soon_as_decodes_have_the_time_in_hand() -> None:
    """A step with the decode and 16 tokens takes 26 ms, twice what was promised."""
    batch = Batch()
    stream = batch.decoding(num_tokens=10, num_outputs=2, tpot_s=0.013)
    prompt = batch.begun(100)
    policy = tpot_cap(batch)
    assert tokens_of(prompt, policy.plan(batch.queues)) == 0, "26 ms are in hand, to the last one"
    stream.lifecycle.first_token_s = 100.01  # and so 10 ms more
    assert tokens_of(prompt, policy.plan(batch.queues)) == MIN_CHUNK


def test_a_prompt_is_not_begun_where_it_would_not_get_on() -> None:
    batch = Batch()
    batch.decoding(tpot_s=0.025)  # 22.5 ms: one decode and 12 tokens
    prompt = batch.waiting(100)
    policy = tpot_cap(batch)
    assert tokens_of(prompt, policy.plan(batch.queues)) == 0
    assert batch.queues.kept_out is prompt
    batch.queues.remove(batch.queues.running[0])
    assert tokens_of(prompt, policy.plan(batch.queues)) == 100


def test_a_chunk_of_a_fixed_size_is_one_whatever_was_promised() -> None:
    batch = Batch()
    batch.decoding(tpot_s=10.0)
    prompt = batch.begun(1000)
    policy = decode_policy(512, 64, "max-batch", batch.perf, batch.clock, local_chunk=32)
    assert tokens_of(prompt, policy.plan(batch.queues)) == 32


def test_what_is_left_of_a_chunk_goes_to_the_next_prompt() -> None:
    batch = Batch()
    batch.decoding(tpot_s=0.100)
    first, second = batch.begun(50), batch.waiting(100)
    rows = tpot_cap(batch).plan(batch.queues)
    assert tokens_of(first, rows) == 50
    assert tokens_of(second, rows) == 30


@pytest.mark.parametrize(
    ("ttft_s", "num_tokens"),
    [(60.0, 80), (0.35, 260), (-1.0, 80)],
    ids=["in time anyway", "late at this pace", "late already"],
)
def test_decodes_that_are_ahead_lend_time_to_a_prompt_that_would_be_late(
    ttft_s: float, num_tokens: int
) -> None:
    batch = Batch()
    # Token 5 is due 4 x 0.1 s behind token 1, which came 0.1 s ago: 0.3 s are in hand.
    batch.decoding(num_tokens=10, num_outputs=4, tpot_s=0.100, first_token_s=99.9)
    prompt = batch.begun(500, ttft_s=ttft_s)
    assert tokens_of(prompt, tpot_cap(batch).plan(batch.queues)) == num_tokens


def test_decodes_without_time_in_hand_lend_none() -> None:
    batch = Batch()
    batch.decoding(num_tokens=10, num_outputs=4, tpot_s=0.100, first_token_s=99.5)
    prompt = batch.begun(500, ttft_s=0.35)
    assert tokens_of(prompt, tpot_cap(batch).plan(batch.queues)) == 80


@pytest.mark.parametrize(
    ("first_token_s", "ttft_s", "num_tokens"),
    [(99.5, 60.0, 0), (99.64, 60.0, 30), (99.5, 0.6, 80), (50.0, 60.0, 80)],
    ids=["behind", "a little ahead", "behind a prompt that is due", "late for good"],
)
def test_a_prompt_waits_for_decodes_that_are_behind_as_long_as_it_can(
    first_token_s: float, ttft_s: float, num_tokens: int
) -> None:
    """Token 5 is due 0.4 s behind token 1, and a step of the decode alone takes 10 ms."""
    batch = Batch()
    batch.decoding(num_tokens=10, num_outputs=4, tpot_s=0.100, first_token_s=first_token_s)
    prompt = batch.begun(500, ttft_s=ttft_s)
    assert tokens_of(prompt, tpot_cap(batch).plan(batch.queues)) == num_tokens


@pytest.mark.parametrize(
    ("ttft_s", "num_tokens"), [(60.0, 0), (0.99, 80), (0.89, 80)], ids=["no", "soon", "late"]
)
def test_a_prompt_does_not_wait_where_one_behind_it_would_be_late(
    ttft_s: float, num_tokens: int
) -> None:
    """The two need ten steps of 90 ms, and the decode is behind its schedule."""
    batch = Batch()
    batch.decoding(num_tokens=10, num_outputs=4, tpot_s=0.100, first_token_s=99.5)
    first = batch.begun(400, ttft_s=0.88)
    batch.begun(400, ttft_s=ttft_s)
    assert tokens_of(first, tpot_cap(batch).plan(batch.queues)) == num_tokens


def test_time_is_lent_to_the_first_prompt_and_not_to_those_behind_it() -> None:
    batch = Batch()
    batch.decoding(num_tokens=10, num_outputs=4, tpot_s=0.100, first_token_s=99.9)
    due, other = batch.begun(150, ttft_s=0.17), batch.begun(500, ttft_s=60.0)
    rows = tpot_cap(batch).plan(batch.queues)
    assert (tokens_of(due, rows), tokens_of(other, rows)) == (150, 0)


def test_a_step_before_an_arrival_is_no_longer_than_that_can_soon_make_up_for() -> None:
    """Three gaps follow the stalled one; a quarter of them win back 90 of 100 ms promised each."""
    batch = Batch()
    prompt, arriving = batch.begun(2000), make_request(3, max_tokens=5)
    policy = tpot_cap(batch)
    assert tokens_of(prompt, policy.plan(batch.queues)) == 512
    arriving.targets = Targets(tpot_s=0.1)
    batch.queues.arriving.add(arriving)
    per_token_s = 0.1 - batch.perf.decode_s(1, 3)
    within_s = 0.9 * (0.1 + 3 / 4 * per_token_s)
    num_tokens = tokens_of(prompt, policy.plan(batch.queues))
    assert num_tokens == int((within_s - 0.009) / 0.001)


def flooded(batch: Batch) -> DecodePolicy:
    """A policy under which one payer has been given more by more than a burst."""
    policy = tpot_cap(batch)
    prompt = batch.begun(3000, payer="flood")
    for _ in range(5):
        policy.plan(batch.queues)  # half a second each
    batch.queues.remove(prompt)
    return policy


@pytest.mark.parametrize(
    ("streams", "first", "behind", "num_tokens"),
    [
        ("flood", "other", "flood", 341),
        ("flood", "other", "other", 80),  # nobody of the flood waits: it is none
        ("flood", "flood", "flood", 80),
        ("other", "other", "flood", 80),
    ],
)
def test_a_prompt_of_others_in_a_flood_gets_what_streams_can_soon_make_up_for(
    streams: str, first: str, behind: str, num_tokens: int
) -> None:
    """0.3 s are in hand, and one of the 4 tokens to come can win back 0.09 s: 9 tenths of it are a
    step of 351 ms, with 341 tokens beside the decode."""
    batch = Batch()
    policy = flooded(batch)
    batch.decoding(10, num_outputs=4, tpot_s=0.1, first_token_s=99.9, max_tokens=8, payer=streams)
    prompt = batch.begun(500, ttft_s=60.0, payer=first)
    batch.waiting(500, ttft_s=90.0, payer=behind)
    assert tokens_of(prompt, policy.plan(batch.queues)) == num_tokens


def test_streams_of_a_higher_priority_are_not_stalled_for_a_flooded_prompt() -> None:
    batch = Batch()
    policy = flooded(batch)
    for payer, priority in (("flood", 0), ("above", 1)):
        batch.decoding(
            10, num_outputs=4, tpot_s=0.1, first_token_s=99.9, payer=payer, priority=priority
        )
    prompt = batch.begun(500, ttft_s=60.0, payer="other")
    batch.waiting(500, ttft_s=90.0, payer="flood")
    assert tokens_of(prompt, policy.plan(batch.queues)) == 79


@pytest.mark.parametrize(
    ("streams", "in_hand_s", "num_tokens"),
    [
        pytest.param("flood", 0.04, 80, id="its own stream: it would be late and does not wait"),
        pytest.param("flood", 0.53, 467, id="its own stream lends it time"),
        pytest.param("other", -99.0, 80, id="too late to catch up: ignored"),
        pytest.param("other", 0.04, 30, id="behind: what is in hand"),
        pytest.param("other", 0.10, 40, id="on schedule: half of the 80 ms to spare"),
        pytest.param("other", 0.52, 40, id="not ahead by the longest step, which takes 521 ms"),
        pytest.param("other", 0.53, 80, id="ahead by the longest step: all, but lent nothing"),
    ],
)
def test_prompts_of_a_flood_leave_time_to_the_streams_of_others(
    streams: str, in_hand_s: float, num_tokens: int
) -> None:
    batch = Batch()
    policy = flooded(batch)
    next_due_s = batch.clock.now() + in_hand_s
    batch.decoding(10, num_outputs=4, tpot_s=0.1, first_token_s=next_due_s - 0.4, payer=streams)
    prompt = batch.begun(500, ttft_s=0.6, payer="flood")
    assert tokens_of(prompt, policy.plan(batch.queues)) == num_tokens


# ---- the order ----------------------------------------------------------------------------------


def test_nobody_is_begun_before_whoever_comes_first() -> None:
    """A request that is to be handed off waits for room; the prompt behind it waits too."""
    batch = Batch(num_blocks=20)
    batch.decoding(3)
    claim = make_request(100)
    claim.lifecycle.received_s = 50.0
    claim.lifecycle.prefill_end_s = 60.0
    batch.queues.claims.append(claim)
    prompt = batch.waiting(8)
    policy = tpot_cap(batch)
    assert policy.first(batch.queues) is claim
    assert tokens_of(prompt, policy.plan(batch.queues)) == 0
    batch.queues.claims.remove(claim)
    assert tokens_of(prompt, policy.plan(batch.queues)) == 8


def test_prompts_of_a_former_role_keep_no_stream_out_and_are_computed() -> None:
    batch = Batch()
    for _ in range(9):
        batch.decoding(tpot_s=0.050)
    leg = batch.waiting(20, leg_token_limit=1)
    claim = make_request(8)
    claim.lifecycle.received_s = 200.0  # after the leg
    batch.queues.claims.append(claim)
    policy = tpot_cap(batch)
    assert policy.first(batch.queues) is claim
    assert tokens_of(leg, policy.plan(batch.queues)) == 20
    assert claim not in batch.queues.running


def test_a_prompt_of_a_former_role_is_begun_beside_streams_that_leave_it_no_time() -> None:
    batch = Batch()
    for _ in range(9):
        batch.decoding(tpot_s=0.020)  # 18 ms, all of which they take
    local = batch.waiting(100)
    leg, next_leg = (batch.waiting(100, leg_token_limit=1) for _ in range(2))
    policy = tpot_cap(batch)
    plans = [policy.plan(batch.queues) for _ in range(MOST_SKIPPED + 1)]
    rows = plans[-1]
    assert tokens_of(leg, rows) == MIN_CHUNK
    assert tokens_of(next_leg, rows) == 0, "one at a time"
    assert tokens_of(local, rows) == 0, "it joins the streams, and so makes them fewer"


def test_legs_of_a_former_role_are_begun_in_their_order() -> None:
    batch = Batch(num_blocks=10)
    batch.decoding(16)  # 4 blocks
    big, small = batch.waiting(30, leg_token_limit=1), batch.waiting(2, leg_token_limit=1)
    assert tokens_of(small, tpot_cap(batch).plan(batch.queues)) == 0
    assert list(batch.queues.waiting) == [big, small]


def test_a_rank_that_changes_while_a_step_is_planned_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Batch()
    older, younger = batch.waiting(8), batch.waiting(8)
    policy = tpot_cap(batch)
    monkeypatch.setattr(policy, "first", lambda _: younger)
    assert tokens_of(older, policy.plan(batch.queues)) == 8, "an idle engine would not ask again"
