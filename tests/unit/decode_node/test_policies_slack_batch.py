"""`slack-batch`: who runs in a step, and how many of mixed promises fit into a batch."""

from __future__ import annotations

from decode_node.policies import DecodePolicy
from pdserve.engine.request import Request
from tests.fakes.runner import decode_policy
from tests.unit.decode_node.batches import Batch


def slack_batch(batch: Batch) -> DecodePolicy:
    return decode_policy(512, 64, "slack-batch", batch.perf, batch.clock)


def planned(policy: DecodePolicy, batch: Batch) -> list[Request]:
    return [row.request for row in policy.plan(batch.queues)]


def test_all_run_while_that_is_fast_enough() -> None:
    batch = Batch()
    requests = [batch.decoding(tpot_s=0.020) for _ in range(9)]
    assert planned(slack_batch(batch), batch) == requests


def test_relaxed_requests_skip_a_step_for_a_tight_one() -> None:
    batch = Batch()
    relaxed = [batch.decoding(tpot_s=0.200) for _ in range(20)]
    tight = batch.decoding(tpot_s=0.0205)
    rows = planned(slack_batch(batch), batch)
    assert rows[0] is tight
    assert len(rows) == 11  # 9 + 11 ms: when the tight one's token is due
    assert len(set(rows) & set(relaxed)) == 10


def test_whoever_has_skipped_comes_next() -> None:
    batch = Batch()
    relaxed = [batch.decoding(tpot_s=0.200) for _ in range(20)]
    tight = batch.decoding(tpot_s=0.020)
    policy = slack_batch(batch)
    first = planned(policy, batch)
    for request in first:
        request.output_token_ids.append(1)
        request.num_computed_tokens += 1
    batch.clock.advance(0.020)
    second = planned(policy, batch)
    assert second[0] is tight
    assert not set(first) & set(second) & set(relaxed), "the others were waiting"


def test_time_in_hand_makes_steps_longer() -> None:
    """A tight stream that is two tokens ahead does not mind a step of three promised gaps."""
    batch = Batch()
    for _ in range(40):
        batch.decoding(tpot_s=0.200)
    batch.decoding(10, tpot_s=0.020, num_outputs=3)
    assert len(planned(slack_batch(batch), batch)) == 41


def test_a_late_stream_does_not_shorten_steps_below_its_promise() -> None:
    batch = Batch()
    others = [batch.decoding(tpot_s=0.200) for _ in range(20)]
    late = batch.decoding(tpot_s=0.020, first_token_s=90.0)
    rows = planned(slack_batch(batch), batch)
    assert rows[0] is late
    assert len(rows) == 9, "18 ms, as if it were in time"
    assert set(rows[1:]) <= set(others)


def test_of_those_that_cannot_wait_the_more_important_go_first() -> None:
    batch = Batch()
    batch.decoding(tpot_s=0.020)
    low = [batch.decoding(tpot_s=0.021) for _ in range(12)]
    high = [batch.decoding(tpot_s=0.022, priority=1) for _ in range(8)]
    rows = planned(slack_batch(batch), batch)
    assert set(high) <= set(rows)
    assert not set(low) <= set(rows)


def test_relaxed_requests_take_a_part_of_a_place() -> None:
    batch = Batch()
    policy = slack_batch(batch)
    for _ in range(60):
        batch.decoding(tpot_s=0.200)
    tight = batch.waiting(3, tpot_s=0.020)  # 18 ms hold 9: the sixty count as six
    assert policy.has_place(batch.queues.streams, tight)
    for _ in range(30):
        batch.decoding(tpot_s=0.200)
    assert not policy.has_place(batch.queues.streams, tight)


def test_with_one_promise_for_all_it_admits_as_tpot_cap_does() -> None:
    batch = Batch()
    policies = [
        decode_policy(512, 64, name, batch.perf, batch.clock)
        for name in ("slack-batch", "tpot-cap")
    ]
    answers = []
    for _ in range(12):
        batch.decoding(tpot_s=0.020)
        newcomer = batch.waiting(3, tpot_s=0.020)
        answers.append([p.has_place(batch.queues.streams, newcomer) for p in policies])
        batch.queues.remove(newcomer)
    assert all(slack == cap for slack, cap in answers)
    assert [True, True] in answers
    assert [False, False] in answers
