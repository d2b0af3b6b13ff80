"""Who is served next, before a policy's own rule has a say; and what is cached of a waiting one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.prompts import make_prompt_order
from pdserve.engine.prompts.order import num_uncached
from pdserve.engine.prompts.shortest import bucket_of
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Lifecycle, Targets
from pdserve.measured.perf_model import PerfModel
from pdserve.settings.config import PrefillPolicyName
from pdserve.shared.clock import ManualClock
from pdserve.shared.fair_share import FairShare
from tests.requests import make_request

BLOCK = 4
every_rule = pytest.mark.parametrize("name", get_args(PrefillPolicyName))


def waiting(
    num_tokens: int = 10, received_s: float = 0.0, *, priority: int = 0, payer: str = ""
) -> Request:
    request = make_request(num_tokens, targets=Targets(payer, priority))
    request.lifecycle = Lifecycle(received_s=received_s)
    return request


def in_order(
    name: PrefillPolicyName, requests: Sequence[Request], shares: FairShare | None = None
) -> list[Request]:
    order = make_prompt_order(name, PerfModel(), ManualClock(), 512, shares)
    return order.sorted(requests, BlockPool(100, BLOCK))


@every_rule
def test_priority_then_fair_share_then_the_rule(name: PrefillPolicyName) -> None:
    shares = FairShare()
    shares.charge(Targets("greedy"), 5.0)
    important = waiting(50, 4.0, priority=1, payer="greedy")
    modest = [waiting(10, 2.0, payer="modest"), waiting(10, 3.0, payer="modest")]
    greedy = waiting(10, 1.0, payer="greedy")
    assert in_order(name, [greedy, *modest, important], shares) == [important, *modest, greedy]


@every_rule
def test_who_asks_for_less_goes_first_before_anybody_has_a_history(name: PrefillPolicyName) -> None:
    flood = [waiting(100, 1.0, payer="flood") for _ in range(3)]
    other = waiting(200, 2.0, payer="other")
    assert in_order(name, [*flood, other]) == [other, *flood]


@every_rule
def test_who_has_streamed_already_goes_first_in_its_priority(name: PrefillPolicyName) -> None:
    """A preempted request: somebody is reading its answer."""
    preempted = waiting(400, 5.0)
    preempted.output_token_ids = [1, 2, 3]
    waits, important = waiting(10, 0.0), waiting(10, 6.0, priority=1)
    assert in_order(name, [waits, preempted, important]) == [important, preempted, waits]


@every_rule
def test_a_step_is_charged_to_classes_by_their_tokens(name: PrefillPolicyName) -> None:
    shares = FairShare(burst=0.0)
    order = make_prompt_order(name, PerfModel(), ManualClock(), 512, shares)
    rows = [Scheduled(waiting(30, payer="a"), 30), Scheduled(waiting(10, payer="b"), 10)]
    order.charge(rows, 2.0)
    assert shares.rank(Targets("a")) == pytest.approx(1.5)
    assert shares.rank(Targets("b")) == pytest.approx(0.5)


@pytest.mark.parametrize(("num_tokens", "bucket"), [(1, 6), (64, 6), (65, 7), (128, 7), (129, 8)])
def test_buckets_are_powers_of_two(num_tokens: int, bucket: int) -> None:
    assert bucket_of(num_tokens) == bucket


# ---- uncached tokens ---------------------------------------------------------------------------


@given(
    moves=st.lists(st.tuples(st.sampled_from(["publish", "evict", "ask"]), st.integers(1, 8))),
    num_tokens=st.integers(1, 35),
)
def test_what_is_cached_is_followed(moves: list[tuple[str, int]], num_tokens: int) -> None:
    """Chains come and go from their ends; at least one token is always to be computed."""
    pool = BlockPool(8, BLOCK)
    request = waiting(num_tokens)
    chain = waiting(35)
    chain.extend_hashes(35, BLOCK)
    for move, number in moves:
        if move == "publish":
            taken = pool.take_prefix(chain.block_hashes)
            new = pool.allocate(min(number, 8 - len(taken)))
            for block_id, block_hash in zip(new, chain.block_hashes[len(taken) :], strict=False):
                pool.publish(block_id, block_hash)
            pool.release(taken + new)
        elif move == "evict":
            pool.release(pool.allocate(number))
        else:
            reusable = chain.block_hashes[: (num_tokens - 1) // BLOCK]
            expected = num_tokens - len(pool.match_prefix(reusable)) * BLOCK
            assert num_uncached(request, pool) == expected


def test_what_was_computed_counts_once_it_is_there() -> None:
    queues = Queues(BlockPool(20, BLOCK), ManualClock())
    first, second = waiting(21), waiting(25)
    for request in (first, second):
        queues.submit(request)
    assert queues.queued_tokens == 46
    assert queues.admit(first)
    first.num_computed_tokens = 12
    for index in range(3):
        queues.pool.publish(first.block_table[index], first.block_hashes[index])
    assert queues.queued_tokens == 9 + 25 - 12
    queues.remove(first)
    queues.remove(second)
