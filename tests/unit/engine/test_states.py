"""Blocks of requests' states: taken with a request's admission, and given back with its others."""

from __future__ import annotations

from pdserve.engine.core import EngineCore
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import decode_policy
from tests.requests import make_request

BLOCK, STATE = 4, 3


def make_core(num_blocks: int) -> EngineCore:
    pool = BlockPool(num_blocks, BLOCK, prefix_cache=False, state_blocks=STATE)
    return EngineCore(Queues(pool, ManualClock()), decode_policy(8, 4), frozenset())


def test_a_request_is_let_in_with_room_for_its_state() -> None:
    core = make_core(9)
    first, second = make_request(2 * BLOCK, max_tokens=1), make_request(BLOCK, max_tokens=1)
    for request in (first, second):
        core.submit(request)
    assert core.queues.admit(first)
    assert len(set(first.block_table) | set(first.state_blocks)) == 2 + STATE
    assert not core.queues.admit(second), "four blocks are free, and it takes one, a next and three"
    core.cancel(first.request_id)
    assert core.pool.num_free == 9
    assert core.queues.admit(second)
    core.queues.preempt(second)
    assert (second.block_table, second.state_blocks) == ([], [])
    assert core.pool.num_free == 9
    core.pool.check_integrity()


def test_after_a_failed_step_states_are_computed_anew() -> None:
    """A step changes them for good: it cannot be repeated, as one that only writes KV."""
    core = make_core(20)
    requests = [make_request(6, max_tokens=2) for _ in range(3)]
    for request in requests:
        core.submit(request)
        assert core.queues.admit(request)
        request.num_computed_tokens = 4
    rows = [Scheduled(request, 2) for request in requests]
    core.abandon_step(rows, requests[:1])
    assert core.queues.running == []
    assert list(core.queues.waiting) == requests[1:], "the oldest is the next one"
    assert requests[1].num_computed_tokens == 0
    assert core.pool.num_free == 20
