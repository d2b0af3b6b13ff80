"""`static`: batches that run to their ends."""

from __future__ import annotations

from tests.requests import make_request
from tests.unit.decode_node.batches import Batch, tokens_of
from tests.unit.engine.fakes import (
    decode_policy,
)


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
