"""What each prefill policy computes first, and how much of it in a step."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest

from pdserve.engine.request import Request
from pdserve.protocol import StepCosts
from pdserve.settings.config import PrefillPolicyName
from prefill_node.policies.prompt_batches import MAX_HALF_DONE
from tests.requests import make_request
from tests.unit.prefill_node.prefills import BLOCK, BUDGET, SATURATING, Prefills

NAMES: list[PrefillPolicyName] = list(get_args(PrefillPolicyName))
GIVING_WAY: list[PrefillPolicyName] = ["sjf-aging", "edf-slack", "buckets"]

every_policy = pytest.mark.parametrize("name", NAMES)


def first_of(prefills: Prefills) -> list[Request]:
    """Who is in the next step."""
    return [request for request, _ in prefills.step()]


# ---- batches -----------------------------------------------------------------------------------


@every_policy
def test_prompts_are_batched_until_the_machine_is_saturated(name: PrefillPolicyName) -> None:
    prefills = Prefills(name)
    prompts = [prefills.submit(20) for _ in range(4)]
    assert SATURATING == 61
    assert prefills.step() == [*((prompt, 20) for prompt in prompts[:3]), (prompts[3], 1)]
    assert prefills.step() == [(prompts[3], 19)]


@every_policy
def test_a_prompt_that_saturates_runs_alone_in_equal_chunks(name: PrefillPolicyName) -> None:
    prefills = Prefills(name, prefill_chunk=100)
    long, other = prefills.submit(230, ttft_s=9.0), prefills.submit(235, ttft_s=9.1)
    assert [prefills.step() for _ in range(3)] == [[(long, n)] for n in (77, 77, 76)]
    assert prefills.run() == [long, other]


def test_what_is_left_of_a_prompt_leaves_room_for_others() -> None:
    prefills = Prefills("fcfs-budget", prefill_chunk=SATURATING)
    long, other = prefills.submit(80), prefills.submit(50)
    assert prefills.step() == [(long, 40)], "no two of them are half-done without need"
    assert prefills.step() == [(long, 40), (other, SATURATING - 40)]
    assert prefills.step() == [(other, 50 - (SATURATING - 40))]


@pytest.mark.parametrize(
    ("name", "chunk"), [("fcfs-budget", BUDGET), ("edf-slack", 2 * SATURATING)], ids=str
)
def test_chunks_are_as_small_as_it_costs_little(name: PrefillPolicyName, chunk: int) -> None:
    """Where nobody is given way to, they are as large as they may be."""
    prefills = Prefills(name)
    long = prefills.submit(10 * chunk)
    assert prefills.step() == [(long, chunk)]


def test_the_batch_follows_the_profile() -> None:
    prefills = Prefills("fcfs-budget")
    prompts = [prefills.submit(20) for _ in range(20)]
    prefills.perf.costs = StepCosts(knot_tokens=[256, 512], knot_s=[0.2, 0.4])
    num_more = prefills.perf.saturating_tokens(BUDGET)
    assert num_more > 2 * SATURATING
    assert first_of(prefills) == prompts[: -(-num_more // 20)]


@every_policy
def test_a_step_has_no_more_prompts_than_rows(name: PrefillPolicyName) -> None:
    prefills = Prefills(name, max_batch_size=2)
    for _ in range(3):
        prefills.submit(10)
    assert [len(first_of(prefills)) for _ in range(3)] == [2, 1, 0]


def test_a_chunk_is_no_larger_than_the_budget() -> None:
    prefills = Prefills("edf-slack", token_budget=50, prefill_chunk=1000)
    assert prefills.step() == []
    long = prefills.submit(120)
    assert [prefills.step() for _ in range(3)] == [[(long, 40)]] * 3


# ---- orders ------------------------------------------------------------------------------------


def test_fcfs_serves_in_the_order_of_arrival() -> None:
    prefills = Prefills("fcfs-budget")
    prompts = [prefills.submit(n) for n in (200, 10, 90, 60)]
    assert prefills.run() == prompts


def test_fcfs_finishes_what_it_has_begun() -> None:
    prefills = Prefills("fcfs-budget")
    long = prefills.submit(600)
    prefills.step()
    short = prefills.submit(10, ttft_s=0.1)
    assert prefills.run() == [long, short]


def test_shortest_first() -> None:
    prefills = Prefills("sjf-aging")
    long, middle, short = (prefills.submit(n) for n in (300, 200, 100))
    assert prefills.run() == [short, middle, long]


def test_what_is_cached_makes_a_prompt_short() -> None:
    prefills = Prefills("sjf-aging")
    prefills.submit(400, prefix=399)
    prefills.run()
    other = prefills.submit(200)
    mostly_cached = prefills.submit(500, prefix=396)
    assert prefills.run()[1:] == [mostly_cached, other]


def test_a_prompt_becomes_short_while_it_waits_for_its_prefix() -> None:
    """The cache fills while the prompt is in the queue."""
    prefills = Prefills("sjf-aging")
    first = prefills.submit(200, prefix=199)
    same = prefills.submit(600, prefix=200)
    other = prefills.submit(450)
    assert prefills.run() == [first, same, other]


def test_no_short_one_goes_past_a_long_one_that_has_waited_for_half_of_its_promise() -> None:
    prefills = Prefills("sjf-aging", prefill_chunk=64)
    long = prefills.submit(500, ttft_s=4.0)
    while long.lifecycle.scheduled_s is None:
        prefills.submit(64, ttft_s=4.0)
        prefills.step()
        assert prefills.clock.now() < 3.0
    assert 1.0 < long.lifecycle.scheduled_s <= 2.0


def test_whoever_is_due_first_goes_first() -> None:
    prefills = Prefills("edf-slack")
    loose = prefills.submit(100, ttft_s=4.0)
    long = prefills.submit(1500, ttft_s=3.0)
    early = prefills.submit(100, ttft_s=0.5)
    assert prefills.run() == [early, long, loose]
    assert all(map(prefills.was_in_time, (early, long, loose)))


def test_who_cannot_be_in_time_goes_last() -> None:
    prefills = Prefills("edf-slack")
    hopeless = prefills.submit(2000, ttft_s=1.0)
    others = [prefills.submit(200, ttft_s=t) for t in (1.5, 1.6, 1.7)]
    assert first_of(prefills) == others[:1]
    prefills.run()
    assert all(map(prefills.was_in_time, others))
    assert prefills.finished[-1] is hopeless


def test_late_ones_get_a_small_share_and_so_they_end() -> None:
    prefills = Prefills("edf-slack")
    late = prefills.submit(300, ttft_s=0.1)
    while prefills.clock.now() < 20.0 and late not in prefills.finished:
        prefills.submit(120, ttft_s=1.0)
        prefills.step()
    assert late in prefills.finished
    seconds = prefills.clock.now()
    assert seconds > 3.0, "0.3 s of 20 % or more would be too much"
    timely = [prefills.was_in_time(r) for r in prefills.finished if r is not late]
    assert all(timely)


def test_the_unpromised_come_in_time_as_well() -> None:
    prefills = Prefills("edf-slack")
    unpromised = prefills.submit(100)
    while unpromised not in prefills.finished:
        prefills.submit(120, ttft_s=2.0)
        prefills.step()
        assert prefills.clock.now() < 30.0
    assert all(prefills.was_in_time(request) for request in prefills.finished)


def test_where_nothing_was_promised_nobody_is_hopeless() -> None:
    """One that takes 24 s, of the 30 s after which it is due, would wait for all that come."""
    prefills = Prefills("edf-slack", num_blocks=20_000)
    long = prefills.submit(24_000, payer="standard")
    while long not in prefills.finished:
        prefills.submit(300, payer="standard")
        prefills.step()
        assert prefills.clock.now() < 25.0
    assert prefills.finished == [long]


def test_a_bucket_at_a_time_and_the_most_urgent_one_first() -> None:
    prefills = Prefills("buckets", prefill_chunk=128)
    short = [prefills.submit(25, ttft_s=3.0), prefills.submit(20, ttft_s=9.0)]
    middle = [prefills.submit(n, ttft_s=2.0) for n in (70, 128)]
    prefills.submit(20, ttft_s=9.0)
    assert first_of(prefills) == middle[:1], "it is due first, and it fills the step"
    assert first_of(prefills) == middle[1:]
    assert first_of(prefills)[:2] == short


# ---- giving way --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GIVING_WAY)
def test_a_long_prompt_gives_way_between_chunks(name: PrefillPolicyName) -> None:
    prefills = Prefills(name)
    long = prefills.submit(1000, ttft_s=20.0)
    prefills.step()
    free = prefills.pool.num_free
    urgent = prefills.submit(30, ttft_s=0.5)
    assert first_of(prefills)[0] is urgent
    assert prefills.pool.num_free == free, "it keeps its blocks meanwhile"
    assert first_of(prefills) == [long]
    assert prefills.run() == [urgent, long]
    assert prefills.was_in_time(urgent)
    assert sum(n for step in prefills.steps for r, n in step if r is long) == 1000, "nothing twice"


@every_policy
def test_every_policy_gives_way_to_priority(name: PrefillPolicyName) -> None:
    prefills = Prefills(name, prefill_chunk=100)
    low = prefills.submit(300)
    prefills.step()
    high = prefills.submit(400, priority=1)
    assert prefills.run() == [high, low]


@every_policy
def test_few_prompts_are_half_done_at_a_time(name: PrefillPolicyName) -> None:
    """A more urgent one that comes later must wait for one of them, and whoever fits need not."""
    prefills = Prefills(name, prefill_chunk=64)
    for number in range(MAX_HALF_DONE + 3):
        prefills.submit(1000 - 64 * number, ttft_s=30.0 - 3 * number)
        prefills.step()
        assert len(prefills.core.queues.running) <= MAX_HALF_DONE
    short = prefills.submit(30, ttft_s=0.2)
    prefills.run()
    assert prefills.was_in_time(short) or name == "fcfs-budget"


def test_half_done_prompts_of_low_priority_keep_no_important_one_out() -> None:
    prefills = Prefills("edf-slack", prefill_chunk=64)
    for number in range(MAX_HALF_DONE):
        prefills.submit(1000, ttft_s=30.0 - 3 * number)
        prefills.step()
    important = prefills.submit(1000, ttft_s=30.0, priority=1)
    assert first_of(prefills) == [important]


# ---- fair shares -------------------------------------------------------------------------------


@every_policy
def test_a_flood_of_one_class_does_not_keep_another_waiting(name: PrefillPolicyName) -> None:
    prefills = Prefills(name, prefill_chunk=100)
    for _ in range(100):
        prefills.submit(100, payer="flood", ttft_s=5.0)
    waits = []
    for _ in range(10):
        for _ in range(8):
            prefills.step()
        calm = prefills.submit(50, payer="calm", ttft_s=5.0)
        while calm not in prefills.finished:
            prefills.step()
        assert calm.lifecycle.first_token_s is not None
        waits.append(calm.lifecycle.first_token_s - calm.lifecycle.received_s)
    assert max(waits) < 0.2, "its own time, and the step that it came in"


def test_equals_do_not_take_turns_with_every_chunk() -> None:
    """Chunks beside each other's contexts cost more than was predicted of the prompt."""
    prefills = Prefills("edf-slack", prefill_chunk=50)
    for payer in 5 * ["a", "b"]:
        prefills.submit(200, payer=payer, ttft_s=5.0)
    prefills.run()
    served = [step[0][0].request_id for step in prefills.steps]
    assert sum(a != b for a, b in pairwise(served)) == 9, "one prompt after the other"


@every_policy
def test_classes_share_by_weight(name: PrefillPolicyName) -> None:
    """Both always have two prompts waiting."""
    prefills = Prefills(name, prefill_chunk=64)
    weights = {"large": 3.0, "small": 1.0}
    for payer in 2 * [*weights]:
        prefills.submit(64, payer=payer, weight=weights[payer])
    for number in range(200):
        prefills.step()
        payer = prefills.finished[number].targets.payer
        prefills.submit(64, payer=payer, weight=weights[payer])
    num_large = sum(r.targets.payer == "large" for r in prefills.finished)
    assert 140 <= num_large <= 160


# ---- room --------------------------------------------------------------------------------------


@every_policy
def test_nobody_is_let_in_past_the_throttle_not_even_by_priority(name: PrefillPolicyName) -> None:
    num_pinned = 6
    prefills = Prefills(name, num_blocks=10, num_kept_free=5, num_pinned=lambda: num_pinned)
    pinned = prefills.pool.allocate(num_pinned)
    prefills.submit(2 * BLOCK)
    important = prefills.submit(BLOCK, priority=1)
    assert prefills.step() == []
    assert prefills.core.queues.held_back.is_running
    assert prefills.core.queues.kept_out is important
    prefills.pool.release(pinned)
    num_pinned = 0
    assert first_of(prefills)[0] is important
    assert not prefills.core.queues.held_back.is_running
    prefills.run()


@every_policy
def test_nobody_goes_past_one_without_room_but_those_who_have_begun_go_on(
    name: PrefillPolicyName,
) -> None:
    prefills = Prefills(name, num_blocks=100, prefill_chunk=64)
    begun = prefills.submit(80 * BLOCK)
    prefills.step()
    large = prefills.submit(30 * BLOCK, priority=1)
    small = prefills.submit(BLOCK)
    assert first_of(prefills) == [begun]
    assert prefills.core.queues.kept_out is large
    finished = prefills.run()
    assert finished[:2] == [begun, large]
    assert finished[2] is small
    assert prefills.core.queues.kept_out is None


def test_a_cancelled_prompt_keeps_nobody_out() -> None:
    prefills = Prefills("edf-slack", num_blocks=20)
    taken = prefills.pool.allocate(15)
    large = prefills.submit(10 * BLOCK)
    prefills.step()
    assert prefills.core.queues.kept_out is large
    prefills.core.cancel(large.request_id)
    assert prefills.core.queues.kept_out is None
    prefills.pool.release(taken)
    prefills.run()


# ---- what a former role has left over ----------------------------------------------------------


@every_policy
def test_streams_of_a_former_role_get_a_token_in_each_step(name: PrefillPolicyName) -> None:
    prefills = Prefills(name, num_blocks=100, num_kept_free=50, prefill_chunk=64)
    streams = []
    for _ in range(3):
        stream = make_request(4 * BLOCK, max_tokens=5, output_token_ids=[1])
        stream.num_computed_tokens = 4 * BLOCK
        stream.block_table = prefills.pool.allocate(20)
        prefills.core.adopt(stream)
        streams.append(stream)
    prompt = prefills.submit(2 * (64 - 3))
    assert prefills.step() == [(s, 1) for s in streams] + [(prompt, 64 - 3)]
    prefills.run()
    assert {len(stream.output_token_ids) for stream in streams} == {5}


def test_the_streams_leave_a_row_to_a_prompt_that_has_begun() -> None:
    prefills = Prefills("fcfs-budget", max_batch_size=2, prefill_chunk=64)
    prompt = prefills.submit(200)
    prefills.step()
    for _ in range(2):
        stream = make_request(BLOCK, max_tokens=3, output_token_ids=[1])
        stream.num_computed_tokens = BLOCK
        stream.block_table = prefills.pool.allocate(2)
        prefills.core.adopt(stream)
    assert [request is prompt for request, _ in prefills.step()] == [False, True]
    prefills.run()
