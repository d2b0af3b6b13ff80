"""Waiting for a place and blocks: whose turn it is, and what the engine hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

import pytest

from decode_node.policies.interface import ChargesDrafts
from decode_node.room import Room, RoomQueue
from pdserve.engine.engine import Engine
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.lifecycle import Targets
from pdserve.node.sessions.session import Notice, Subscription
from pdserve.protocol import HandoffRecord, SamplingParams
from pdserve.settings.config import DecodePolicyName
from pdserve.shared.errors import DeadlineExceeded, PeerLost
from tests.fakes.runner import (
    decode_policy,
)
from tests.requests import make_request
from tests.unit.decode_node.batches import BLOCK, Batch
from tests.waits import turn


class Bench(Batch):
    """A room queue over an engine that does not run."""

    def __init__(
        self, num_blocks: int = 10, name: DecodePolicyName = "max-batch", max_batch_size: int = 8
    ) -> None:
        super().__init__(num_blocks)
        self.policy = decode_policy(64, max_batch_size, name, self.perf, self.clock)
        self.engine = Engine(Queues(self.pool, self.clock), self.policy, frozenset())
        self.queues = self.engine.queues
        self.room = RoomQueue(self.engine, self.policy)
        self.tasks: dict[Request, asyncio.Task[Room]] = {}
        self.subscriptions: dict[Request, Subscription] = {}

    async def ask(
        self, num_tokens: int, priority: int = 0, tpot_s: float = inf, deadline_s: float = inf
    ) -> Request:
        """Somebody new asks for room."""
        request = make_request(
            num_tokens,
            targets=Targets(
                priority=priority, tpot_s=tpot_s, deadline_s=deadline_s, payer=f"p{priority}"
            ),
        )
        request.lifecycle.received_s = self.clock.now()
        self.clock.advance(0.001)
        subscription = self.subscriptions[request] = Subscription("s", lambda _: None)
        self.tasks[request] = asyncio.create_task(self.room.take(subscription, request))
        await turn()
        return request

    def has_room(self, request: Request) -> bool:
        return self.tasks[request].done()

    async def release(self, request: Request) -> None:
        """Its KV did not come."""
        self.room.leave(request)
        self.pool.release(request.block_table)
        await turn()


@asynccontextmanager
async def made(bench: Bench) -> AsyncIterator[Bench]:
    try:
        yield bench
    finally:
        for task in bench.tasks.values():
            task.cancel()
        await asyncio.gather(*bench.tasks.values(), return_exceptions=True)
        assert not bench.queues.claims


async def test_whoever_has_room_is_expected_in_the_batch() -> None:
    async with made(Bench()) as bench:
        request = await bench.ask(7)
        assert bench.has_room(request)
        assert bench.queues.streams == [request]
        assert len(request.block_table) == 2
        await bench.release(request)
        assert bench.queues.streams == []
        assert bench.pool.num_free == 10


async def test_equals_come_in_the_order_in_which_their_legs_did() -> None:
    async with made(Bench()) as bench:
        first = await bench.ask(9 * BLOCK)
        second, third = await bench.ask(8 * BLOCK), await bench.ask(2)
        assert not bench.has_room(third), "nobody goes past the first one"
        await bench.release(first)
        assert bench.has_room(second)
        assert not bench.has_room(third)


async def test_a_higher_priority_goes_before_those_who_wait() -> None:
    async with made(Bench()) as bench:
        first = await bench.ask(9 * BLOCK)
        low, high = await bench.ask(4 * BLOCK), await bench.ask(8 * BLOCK, priority=1)
        await bench.release(first)
        assert bench.has_room(high)
        assert not bench.has_room(low)


@pytest.mark.parametrize("what", ["decodes", "drafts"])
async def test_the_class_that_was_given_less_goes_first(what: str) -> None:
    async with made(Bench()) as bench:
        blocker = await bench.ask(9 * BLOCK)
        flood = [await bench.ask(9 * BLOCK) for _ in range(3)]
        other = await bench.ask(9 * BLOCK)
        for request in (*flood, blocker):
            request.targets = Targets(payer="flood")
        other.targets = Targets(payer="other")
        if what == "drafts":  # wrong ones, say, of which it had nothing
            assert isinstance(bench.policy, ChargesDrafts)
            bench.policy.charge(blocker, 1.0)
        else:
            line = bench.policy.line  # type: ignore[attr-defined]
            line.charge_decodes(bench.queues, [blocker], 1.0)
        await bench.release(blocker)
        assert bench.has_room(other)
        assert not any(map(bench.has_room, flood))


async def test_it_waits_for_a_place_in_the_batch_as_well() -> None:
    async with made(Bench(max_batch_size=2)) as bench:
        requests = [await bench.ask(3) for _ in range(3)]
        assert [bench.has_room(r) for r in requests] == [True, True, False]
        await bench.release(requests[0])
        assert bench.has_room(requests[2])


async def test_its_own_promise_keeps_it_out_of_a_slow_batch() -> None:
    async with made(Bench(name="tpot-cap", num_blocks=40)) as bench:
        for _ in range(3):
            bench.decoding(tpot_s=1.0)
        tight = await bench.ask(3, tpot_s=0.014)  # 12.6 ms are three tokens
        assert not bench.has_room(tight)
        bench.queues.remove(bench.queues.running[0])
        await turn()
        assert bench.has_room(tight)


async def test_who_has_token_1_waits_for_nobody_whose_prompt_is_still_computed() -> None:
    """The place of a prompt under way is nobody's until its own token 1."""
    async with made(Bench(name="tpot-cap", num_blocks=40)) as bench:
        under_way = await bench.ask(9, tpot_s=0.011)  # 9.9 ms: no batch of two
        next_one, chat = await bench.ask(9, tpot_s=0.011), await bench.ask(2, tpot_s=0.011)
        assert bench.has_room(under_way)
        hear_record(bench, chat)
        await turn()
        assert bench.has_room(chat)
        hear_record(bench, under_way)
        hear_record(bench, next_one)
        await turn()
        assert not bench.has_room(next_one), "two are there, or about to be"


async def test_it_gives_its_turn_away_when_it_leaves() -> None:
    async with made(Bench()) as bench:
        await bench.ask(9 * BLOCK)
        big, small = await bench.ask(9 * BLOCK), await bench.ask(2)
        bench.tasks[big].cancel()
        await turn()
        assert not bench.has_room(small), "9 of 10 blocks are taken, and one is kept to grow into"
        hear_record(bench, small)
        await turn()
        prompt = bench.waiting(2)
        assert bench.policy.first(bench.queues) is small
        bench.tasks[small].cancel()
        await turn()
        assert bench.policy.first(bench.queues) is prompt
        assert bench.engine._wake.is_set(), "an idle engine must look at the prompt again"


async def test_a_handoff_that_ends_is_heard() -> None:
    async with made(Bench(max_batch_size=1)) as bench:
        await bench.ask(2)
        waiting = await bench.ask(2)
        bench.subscriptions[waiting].fail(PeerLost("gone"))
        await turn()
        with pytest.raises(PeerLost):
            bench.tasks[waiting].result()


async def test_nobody_is_given_room_beyond_its_deadline() -> None:
    async with made(Bench(max_batch_size=1)) as bench:
        first = await bench.ask(2)
        late = await bench.ask(2, deadline_s=bench.clock.now() + 1.0)
        bench.clock.advance(2.0)
        await bench.release(first)
        with pytest.raises(DeadlineExceeded):
            bench.tasks[late].result()


# ---- in an overload -----------------------------------------------------------------------------


async def test_whoever_can_still_be_in_time_goes_before_those_who_cannot() -> None:
    async with made(Bench(max_batch_size=1)) as bench:
        first = await bench.ask(2)
        late, timely = await bench.ask(2, tpot_s=0.1), await bench.ask(2, tpot_s=0.1)
        for request in (late, timely):
            request.sampling = SamplingParams(max_tokens=100)  # wins back 1 s, at 0.01 s a token
        hear_record(bench, late)
        bench.clock.advance(2.0)
        hear_record(bench, timely)
        await bench.release(first)
        assert bench.has_room(timely)
        assert not bench.has_room(late)


async def test_before_its_prefill_is_over_a_wait_costs_nothing() -> None:
    async with made(Bench(max_batch_size=1)) as bench:
        first = await bench.ask(2)
        older, younger = await bench.ask(2, tpot_s=0.1), await bench.ask(2, tpot_s=0.1)
        bench.clock.advance(100.0)
        await bench.release(first)
        assert bench.has_room(older)
        assert not bench.has_room(younger)


async def test_the_late_ones_get_a_small_share_nevertheless() -> None:
    async with made(Bench(max_batch_size=1)) as bench:
        running = await bench.ask(2)
        late = [await bench.ask(2, tpot_s=0.1) for _ in range(10)]
        for request in late:
            hear_record(bench, request)
        bench.clock.advance(20.0)
        timely = []
        for _ in range(60):
            timely.append(await bench.ask(2, tpot_s=0.1))
            running.output_token_ids = [1]
            running.num_computed_tokens = 2
            line = bench.policy.line  # type: ignore[attr-defined]
            line.charge_decodes(bench.queues, [running], 0.01)
            await bench.release(running)
            running = next(r for r in (*late, *timely) if r in bench.queues.arriving)
        assert 2 <= sum(map(bench.has_room, late)) <= 5


def hear_record(bench: Bench, request: Request) -> None:
    """Its prefill has just ended."""
    record = HandoffRecord(request_id="r", num_tokens=2, token_ids=[1])
    bench.subscriptions[request].put(Notice(record, bench.clock.now()))
