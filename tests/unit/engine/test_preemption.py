"""Preempted requests: how they wait, who waits for them, and how their KV comes back."""

from __future__ import annotations

from pdserve.engine.core import EngineCore
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import (
    decode_policy,
)
from tests.requests import make_request

BLOCK = 4


def make_queues(num_blocks: int = 20) -> Queues:
    return Queues(BlockPool(num_blocks, BLOCK), ManualClock())


def run(queues: Queues, num_tokens: int, received_s: float = 0.0, **fields: object) -> Request:
    """A decoding request in the batch."""
    request = make_request(num_tokens - 1, max_tokens=50, output_token_ids=[1], **fields)
    request.lifecycle.received_s = received_s
    request.num_computed_tokens = num_tokens - 1
    request.block_table = queues.pool.allocate(-(-num_tokens // BLOCK))
    queues.running.append(request)
    return request


def test_one_victim_frees_blocks_for_many() -> None:
    queues = make_queues(8)
    streams = [run(queues, 4, s) for s in range(2)]
    big = run(queues, 24, 2.0)
    for request in streams:
        request.output_token_ids.append(1)
        request.num_computed_tokens += 1
    rows = queues.decode(queues.decoding)
    assert [row.request for row in rows] == streams
    assert queues.preemptions.statistics.for_blocks == 1
    assert list(queues.waiting) == [big]
    assert big.num_preemptions == 1


def test_a_victim_that_had_its_row_already_loses_it() -> None:
    queues = make_queues(4)
    ahead = run(queues, 8, targets=Targets(tpot_s=9.0))
    ahead.lifecycle.first_token_s = 0.0
    needy = run(queues, 8, targets=Targets(tpot_s=0.1))
    needy.lifecycle.first_token_s = 0.0
    needy.output_token_ids.append(1)
    needy.num_computed_tokens += 1
    assert [row.request for row in queues.decode([ahead, needy])] == [needy]


def test_after_a_preemption_nobody_is_let_in_for_a_while() -> None:
    queues = make_queues()
    run(queues, 4)
    victim = run(queues, 4)
    newcomer, important = make_request(4), make_request(4, targets=Targets(priority=1))
    queues.preempt(victim)
    for _ in range(BLOCK):
        assert queues.is_closed_to(newcomer)
        assert queues.is_closed_to(victim), "it would be thrown out again"
        assert not queues.is_closed_to(important)
        queues.decode(queues.decoding)
    assert not queues.is_closed_to(newcomer)
    assert not queues.is_closed_to(victim)


def test_beside_nobody_there_is_nothing_to_wait_for() -> None:
    queues = make_queues()
    victim = run(queues, 4)
    queues.preempt(victim)
    assert not queues.is_closed_to(victim)
    assert queues.admit(victim)


def test_a_preemption_for_priority_closes_nothing() -> None:
    queues = make_queues()
    run(queues, 4)
    queues.preempt(run(queues, 4), for_priority=True)
    assert not queues.is_closed_to(make_request(4))


def test_what_it_finds_in_the_pool_is_not_computed_again() -> None:
    queues = make_queues()
    victim = run(queues, 11)
    victim.extend_hashes(8, BLOCK)
    for block_id, block_hash in zip(victim.block_table, victim.block_hashes, strict=False):
        queues.pool.publish(block_id, block_hash)
    queues.preempt(victim)
    assert queues.admit(victim)
    assert victim.num_computed_tokens == 8
    statistics = queues.preemptions.statistics
    assert (statistics.cached_tokens, statistics.computed_tokens) == (8, 3)
    assert victim.num_cached_tokens == 0, "the prompt's hits are the prefill's"


# ---- recall -------------------------------------------------------------------------------------


class Recalled:
    """A core with a preempted request whose KV is being fetched, and a stream beside it."""

    def __init__(self) -> None:
        self.queues = Queues(BlockPool(20, BLOCK), ManualClock(), could_fetch=self.could_fetch)
        self.core = EngineCore(self.queues, decode_policy(64, 8), frozenset())
        self.asked: list[Request] = []
        self.stream, self.victim = (self.adopt() for _ in range(2))
        self.queues.preempt(self.victim, for_priority=True)

    def could_fetch(self, request: Request) -> bool:
        self.asked.append(request)
        return True

    def adopt(self) -> Request:
        request = make_request(7, max_tokens=50, output_token_ids=[1], num_computed_tokens=7)
        request.block_table = self.core.pool.allocate(2)
        self.core.adopt(request)
        return request

    def planned(self) -> list[Request]:
        rows = [row.request for row in self.core.begin_step()]
        self.core._in_step = set()
        return rows


def test_a_preempted_request_is_recalled_when_there_is_room() -> None:
    bench = Recalled()
    assert bench.planned() == [bench.stream]
    assert bench.asked == [bench.victim]
    assert bench.victim not in bench.queues.waiting
    newcomer = make_request(4)
    bench.core.submit(newcomer)
    assert bench.planned() == [bench.stream], "newcomers wait for those who come back"
    bench.core.submit(bench.victim)  # as its preparation does in the end
    assert bench.queues.waiting[0] is bench.victim
    assert set(bench.planned()) == {bench.stream, bench.victim, newcomer}
    assert bench.asked == [bench.victim], "once is enough"
    assert bench.queues.preemptions.statistics.recalls == 1


def test_it_is_not_recalled_while_there_is_no_room() -> None:
    bench = Recalled()
    others = bench.core.pool.allocate(bench.core.pool.num_free)
    assert bench.planned() == [bench.stream]
    assert bench.asked == []
    bench.core.pool.release(others)
    bench.planned()
    assert bench.asked == [bench.victim]


def test_a_cancel_while_it_is_away_leaves_nothing_behind() -> None:
    bench = Recalled()
    bench.planned()
    assert bench.core.cancel(bench.victim.request_id)
    assert not bench.queues.preemptions.away
    assert bench.core.num_requests == 1
    newcomer = make_request(4)
    bench.core.submit(newcomer)
    assert newcomer in bench.planned(), "nobody waits for it any more"
    bench.core.cancel(bench.stream.request_id)
    bench.core.cancel(newcomer.request_id)
    assert bench.core.pool.num_free == 20


def test_each_preemption_is_asked_for_anew() -> None:
    bench = Recalled()
    bench.planned()
    bench.core.submit(bench.victim)
    bench.planned()
    bench.queues.preempt(bench.victim, for_priority=True)
    bench.planned()
    assert bench.asked == [bench.victim, bench.victim]
