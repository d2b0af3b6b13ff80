"""Somebody more important comes: who gives way, and when nobody does."""

from __future__ import annotations

from pdserve.engine.request import Request
from pdserve.lifecycle import Targets
from tests.fakes.runner import (
    decode_policy,
)
from tests.requests import make_request
from tests.unit.decode_node.batches import BLOCK, Batch, tokens_of


def claim(batch: Batch, num_tokens: int, priority: int) -> Request:
    """A request to be handed off, waiting for room."""
    request = make_request(num_tokens, targets=Targets(priority=priority))
    request.lifecycle.received_s = batch.clock.now()
    batch.queues.claims.append(request)
    return request


def test_a_full_batch_makes_room_for_a_higher_priority() -> None:
    batch = Batch()
    low = [batch.decoding() for _ in range(2)]
    batch.clock.advance(1.0)
    newest = batch.decoding()
    policy = decode_policy(512, 3, "max-batch", batch.perf, batch.clock)
    high = batch.waiting(8, priority=1)
    rows = policy.plan(batch.queues)
    assert tokens_of(high, rows) == 8
    assert list(batch.queues.waiting) == [newest], "without promises the youngest gives way"
    assert batch.queues.preemptions.statistics.for_priority == 1
    assert all(request in batch.queues.running for request in low)


def test_equals_are_not_preempted() -> None:
    batch = Batch()
    batch.decoding(priority=1, payer="other")
    policy = decode_policy(512, 1, "max-batch", batch.perf, batch.clock)
    equal = batch.waiting(8, priority=1)
    assert tokens_of(equal, policy.plan(batch.queues)) == 0
    assert batch.queues.preemptions.statistics.total == 0


def test_whoever_has_the_most_slack_of_the_lowest_priority_gives_way() -> None:
    batch = Batch()
    batch.decoding(priority=1, tpot_s=5.0)
    batch.decoding(tpot_s=0.5)
    ahead = batch.decoding(8, tpot_s=0.5, num_outputs=4)
    policy = decode_policy(512, 3, "max-batch", batch.perf, batch.clock)
    batch.waiting(8, priority=2)
    policy.plan(batch.queues)
    assert list(batch.queues.waiting) == [ahead]


def test_as_many_give_way_as_the_promise_takes() -> None:
    batch = Batch()
    for _ in range(12):
        batch.decoding(tpot_s=1.0)
    policy = decode_policy(512, 64, "tpot-cap", batch.perf, batch.clock)
    high = batch.waiting(3, priority=1, tpot_s=0.020)  # 18 ms hold nine
    rows = policy.plan(batch.queues)
    assert tokens_of(high, rows) == 3
    assert len(batch.queues.waiting) == 4


def test_blocks_are_made_free_for_a_request_that_is_to_be_handed_off() -> None:
    batch = Batch(num_blocks=10)
    low = batch.decoding(16)  # 4 blocks
    kept = batch.decoding(16, priority=1)
    high = claim(batch, 19, priority=1)  # 5 blocks, token 1 included, beside one to grow into
    policy = decode_policy(512, 64, "max-batch", batch.perf, batch.clock)
    rows = policy.plan(batch.queues)
    assert [row.request for row in rows] == [kept]
    assert list(batch.queues.waiting) == [low]
    assert batch.queues.num_missing(high) == 0
    assert policy.first(batch.queues) is high
    assert policy.plan(batch.queues)[0].request is kept, "the victim does not come back before it"
    assert low in batch.queues.waiting


def test_nobody_gives_way_in_vain() -> None:
    batch = Batch(num_blocks=10)
    batch.decoding(16)
    batch.decoding(16, priority=1)
    claim(batch, 30, priority=1)
    policy = decode_policy(512, 64, "max-batch", batch.perf, batch.clock)
    assert len(policy.plan(batch.queues)) == 2


def test_shared_blocks_do_not_count_as_gained() -> None:
    batch = Batch(num_blocks=10)
    low = batch.decoding(16)
    batch.pool.retain(low.block_table)  # somebody else's as well
    claim(batch, 7 * BLOCK, priority=1)
    policy = decode_policy(512, 64, "max-batch", batch.perf, batch.clock)
    assert [row.request for row in policy.plan(batch.queues)] == [low]


def test_whoever_has_given_way_often_enough_is_spared_while_there_is_another() -> None:
    batch = Batch()
    low, often = batch.decoding(), batch.decoding(9, num_outputs=5, tpot_s=1.0)
    often.num_preemptions = batch.queues.victims.max_preemptions
    policy = decode_policy(512, 2, "max-batch", batch.perf, batch.clock)
    batch.waiting(8, priority=1)
    policy.plan(batch.queues)
    assert list(batch.queues.waiting) == [low]
    batch.waiting(8, priority=2)
    policy.plan(batch.queues)
    assert set(batch.queues.waiting) == {low, often}, "it does not keep a higher priority waiting"


def test_a_victim_waits_before_newcomers_of_its_priority() -> None:
    batch = Batch()
    victim = batch.decoding()
    batch.clock.advance(1.0)
    policy = decode_policy(512, 1, "max-batch", batch.perf, batch.clock)
    newcomer = batch.waiting(8)
    high = batch.waiting(8, priority=1)
    policy.plan(batch.queues)
    batch.queues.remove(high)
    assert policy.first(batch.queues) is victim
    policy.plan(batch.queues)
    assert victim in batch.queues.running
    assert newcomer in batch.queues.waiting
