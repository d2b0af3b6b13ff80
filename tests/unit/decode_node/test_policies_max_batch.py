"""`max-batch`: what a step computes when there is more than fits into one."""

from __future__ import annotations

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import (
    decode_policy,
)
from tests.requests import make_request

BLOCK = 4


def queues_with(num_decoding: int) -> Queues:
    """So many adopted requests are decoding."""
    queues = Queues(BlockPool(100, BLOCK), ManualClock())
    for _ in range(num_decoding):
        request = make_request(2, output_token_ids=[1], num_computed_tokens=2)
        request.block_table = queues.pool.allocate(1)
        queues.running.append(request)
    return queues


def begin_prompt(queues: Queues, num_tokens: int) -> Request:
    request = make_request(num_tokens)
    queues.waiting.append(request)
    assert queues.admit(request)
    return request


def tokens_of(request: Request, rows: list[Scheduled]) -> int:
    return sum(row.num_tokens for row in rows if row.request is request)


def test_decodes_come_first_and_prompts_get_the_rest_of_the_budget() -> None:
    queues = queues_with(3)
    prompt = begin_prompt(queues, 20)
    rows = decode_policy(10, 8).plan(queues)
    assert [row.num_tokens for row in rows] == [1, 1, 1, 7]
    assert rows[-1].request is prompt


def test_a_full_batch_of_decodes_does_not_starve_a_prompt_that_has_begun() -> None:
    queues = queues_with(3)
    prompt = begin_prompt(queues, 20)
    rows = decode_policy(10, 2).plan(queues)
    assert len(rows) == 2
    assert tokens_of(prompt, rows) == 9


def test_a_budget_full_of_decodes_does_not_starve_a_prompt_that_has_begun() -> None:
    queues = queues_with(3)
    prompt = begin_prompt(queues, 20)
    rows = decode_policy(3, 8).plan(queues)
    assert tokens_of(prompt, rows) == 1


def test_without_a_prompt_the_whole_batch_decodes() -> None:
    rows = decode_policy(10, 2).plan(queues_with(3))
    assert [row.num_tokens for row in rows] == [1, 1]


def test_a_prompt_that_has_not_begun_waits_for_a_place_in_the_batch() -> None:
    queues = queues_with(3)
    queues.waiting.append(make_request(4))
    rows = decode_policy(10, 2).plan(queues)
    assert [row.num_tokens for row in rows] == [1, 1]
