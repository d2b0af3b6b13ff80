"""`static`: batches that run to their ends."""

from __future__ import annotations

import pytest

from decode_node.policies.interface import SideBySide
from tests.fakes.runner import decode_policy
from tests.requests import make_request
from tests.unit.decode_node.batches import Batch, tokens_of


def test_prompts_fill_the_batch_before_anybody_decodes() -> None:
    batch = Batch()
    policy = decode_policy(512, 4, "static", batch.perf, batch.clock)
    prompts = [batch.waiting(300) for _ in range(3)]
    first = policy.plan(batch.queues)
    assert [row.num_tokens for row in first] == [300, 212]
    for row in first:
        row.request.num_computed_tokens += row.num_tokens
    prompts[0].output_token_ids.append(1)
    second = policy.plan(batch.queues)
    assert [row.num_tokens for row in second] == [88, 300]
    assert prompts[0] not in [row.request for row in second]


def test_nobody_joins_a_batch_that_decodes_until_it_is_over() -> None:
    batch = Batch()
    policy = decode_policy(512, 4, "static", batch.perf, batch.clock)
    running = [batch.decoding(num_outputs=2) for _ in range(2)]
    newcomer = batch.waiting(8)
    assert not policy.has_place(batch.queues.streams, newcomer)
    assert [row.request for row in policy.plan(batch.queues)] == running
    batch.queues.remove(running[0])
    assert [row.request for row in policy.plan(batch.queues)] == [running[1]]
    batch.queues.remove(running[1])
    assert tokens_of(newcomer, policy.plan(batch.queues)) == 8


def test_handed_off_requests_are_let_in_until_the_first_step() -> None:
    batch = Batch()
    policy = decode_policy(512, 3, "static", batch.perf, batch.clock)
    adopted = batch.decoding(num_outputs=1)
    batch.queues.arriving.add(make_request(4))
    assert policy.has_place(batch.queues.streams, make_request(4))
    batch.queues.arriving.add(make_request(4))
    assert not policy.has_place(batch.queues.streams, make_request(4)), "the batch is full"
    adopted.output_token_ids.append(1)
    assert not policy.has_place([adopted], make_request(4)), "the batch has begun"


def test_whoever_was_preempted_from_the_batch_comes_back_to_it() -> None:
    batch = Batch()
    policy = decode_policy(512, 4, "static", batch.perf, batch.clock)
    batch.decoding(num_outputs=3)
    preempted = batch.decoding(6, num_outputs=3)
    batch.queues.preempt(preempted, for_priority=True)
    assert tokens_of(preempted, policy.plan(batch.queues)) == 6


# ---- side by side --------------------------------------------------------------------------------


def test_beside_prompts_nobody_decodes_either_before_the_batch_is_complete() -> None:
    batch = Batch()
    policy = decode_policy(512, 2, "static", batch.perf, batch.clock)
    assert isinstance(policy, SideBySide)
    first = batch.decoding(num_outputs=1)  # its prompt has just been computed
    second, third = batch.waiting(300), batch.waiting(300)
    assert policy.plan_decodes(batch.queues) == [], "another prompt can be computed"
    assert tokens_of(second, policy.plan_prompts(batch.queues)) == 256
    batch.queues.elsewhere = {second}
    assert policy.plan_decodes(batch.queues) == [], "it is computed"
    second.num_computed_tokens = 256
    batch.queues.elsewhere = set()
    assert policy.plan_decodes(batch.queues) == [], "it was computed in part"
    second.num_computed_tokens = 300
    second.output_token_ids.append(1)
    assert policy.plan_prompts(batch.queues) == [], "the batch is full"
    assert [row.request for row in policy.plan_decodes(batch.queues)] == [first, second]
    batch.queues.remove(second)
    first.output_token_ids.append(1)
    first.num_computed_tokens += 1
    assert policy.plan_prompts(batch.queues) == [], "the batch has begun"
    assert [row.request for row in policy.plan_decodes(batch.queues)] == [first]
    assert list(batch.queues.waiting) == [third]


def test_a_batch_does_not_wait_for_a_prompt_that_has_no_room() -> None:
    batch = Batch(num_blocks=6)
    policy = decode_policy(512, 4, "static", batch.perf, batch.clock)
    assert isinstance(policy, SideBySide)
    stream = batch.decoding(num_outputs=1)
    batch.waiting(60)
    assert policy.plan_prompts(batch.queues) == []
    assert [row.request for row in policy.plan_decodes(batch.queues)] == [stream]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_stream_that_another_node_takes_over_waits_for_no_batch(*, is_split: bool) -> None:
    """Its taker waits for its last token here: with both loops asleep, until it gave up."""
    batch = Batch()
    policy = decode_policy(512, 4, "static", batch.perf, batch.clock)
    assert isinstance(policy, SideBySide)
    leaving, member = (batch.decoding(num_outputs=n) for n in (3, 1))
    leaving.leg_token_limit = 4
    newcomer = batch.waiting(8)
    plan = policy.plan_decodes if is_split else policy.plan
    rows = [row.request for row in plan(batch.queues)]
    assert rows == ([leaving] if is_split else [leaving, newcomer])
    assert member not in rows, "the batch is still open"
