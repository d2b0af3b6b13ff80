"""A preempted request's KV comes back: out of the host tier, from its prefill node, or computed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from pdserve.engine.engine import Engine
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.node.prefixes.offers import PrefixOffers
from pdserve.node.preparation import Preparation
from pdserve.protocol import PrefixSource
from pdserve.shared.clock import ManualClock
from tests.fakes.runner import (
    decode_policy,
)
from tests.requests import make_request
from tests.unit.node.compilers import SlowCompiler
from tests.unit.node.prefixes.prefix_nodes import (
    BLOCK,
    NUM_BLOCKS,
    PROMPT,
    PrefixNode,
    started,
    steps_take,
)
from tests.waits import until

ANSWER = list(range(800, 811))
HISTORY = PROMPT + ANSWER  # 62 tokens: fifteen full blocks, and two tokens


class Bench:
    """A decode node with a host tier, beside the prefill node that has the prompt's KV."""

    def __init__(self) -> None:
        self.node = PrefixNode("d", pull="auto", tier_blocks=20)
        self.source = PrefixNode("p")
        steps_take(self.node, 10.0)  # computing never pays
        offers = PrefixOffers(self.node.pool, self.node.sessions, self.node.tier, "auto")
        queues = Queues(self.node.pool, ManualClock(), could_fetch=offers.has_kv_of)
        self.core = Engine(queues, decode_policy(512, 8), frozenset())
        self.preparation = Preparation(self.node.fetcher, SlowCompiler(), self.core)
        self.statistics = queues.preemptions.statistics

    @property
    def fetched(self) -> tuple[int, int]:
        """Tokens from the tier, and from nodes."""
        return self.statistics.swapped_tokens, self.statistics.pulled_tokens

    def adopted(self, sources: list[PrefixSource]) -> Request:
        """It has decoded ten tokens."""
        request = make_request(
            PROMPT, max_tokens=100, output_token_ids=list(ANSWER), prefix_sources=sources
        )
        request.num_computed_tokens = request.num_tokens - 1
        self.node.compute(HISTORY)
        request.extend_hashes(request.num_tokens, BLOCK)
        request.block_table = self.node.pool.take_prefix(request.block_hashes)
        request.block_table += self.node.pool.allocate(1)
        self.core._requests[request.request_id] = request
        self.core.queues.running.append(request)
        return request

    async def comes_back(self, request: Request) -> int:
        """Tokens of it that need not be computed."""
        self.plan()
        await until(lambda: request in self.core.queues.waiting or bool(request.block_table))
        self.plan()
        num_tokens = request.num_computed_tokens
        self.core.cancel(request.request_id)
        return num_tokens

    def plan(self) -> None:
        self.core.begin_step()
        self.core._in_step = set()
        recalled = self.core.queues.preemptions.to_recall
        while recalled:
            self.preparation.recall(recalled.pop())

    async def until_stored(self, num_blocks: int) -> None:
        tier = self.node.tier
        assert tier is not None
        await until(lambda: tier.tier.statistics.stored >= num_blocks)
        await until(lambda: self.node.pool.num_free == NUM_BLOCKS)


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    async with started(bench.node, bench.source):
        yield bench
        await bench.preparation.close()


async def test_what_is_in_the_pool_still_is_just_taken(bench: Bench) -> None:
    request = bench.adopted([])
    bench.core.queues.preempt(request, for_priority=True)
    assert await bench.comes_back(request) == 60
    assert bench.statistics.recalls == 0


async def test_what_was_overwritten_is_swapped_in_its_answer_included(bench: Bench) -> None:
    request = bench.adopted([])
    bench.core.queues.preempt(request, for_priority=True)
    await bench.until_stored(15)
    bench.node.flood()
    assert await bench.comes_back(request) == 60
    assert bench.node.num_cached_tokens(HISTORY) == 60, "bit by bit"
    assert bench.fetched == (60, 0)


async def test_what_the_tier_lacks_is_pulled_from_its_prefill_node_again(bench: Bench) -> None:
    bench.source.compute(PROMPT)
    request = bench.adopted([bench.source.source_for(bench.node, len(PROMPT))])
    bench.core.queues.preempt(request, for_priority=True)
    bench.node.flood()  # before anything was copied
    assert await bench.comes_back(request) == 48
    assert bench.fetched == (0, 48)
    assert bench.core.queues.preemptions.statistics.computed_tokens == 62 - 48


async def test_it_is_computed_where_that_is_quicker(bench: Bench) -> None:
    bench.source.compute(PROMPT)
    request = bench.adopted([bench.source.source_for(bench.node, len(PROMPT))])
    steps_take(bench.node, 1e-9)
    bench.core.queues.preempt(request, for_priority=True)
    bench.node.flood()
    assert await bench.comes_back(request) == 0
    assert bench.fetched == (0, 0)
    assert bench.node.fetcher.statistics.declined > 0


async def test_cancelled_while_its_kv_is_fetched_it_does_not_come_back(bench: Bench) -> None:
    request = bench.adopted([])
    bench.core.queues.preempt(request, for_priority=True)
    await bench.until_stored(15)
    bench.node.flood()
    bench.plan()
    assert request in bench.core.queues.preemptions.away
    bench.preparation.cancel(request.request_id)
    await until(lambda: bench.node.pool.num_free == NUM_BLOCKS)
    assert not bench.core.queues.waiting
    assert not bench.core.queues.preemptions.away
    assert bench.core.num_requests == 0
