"""Requests whose grammar is compiled first: nobody else waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from pdserve.clock import ManualClock
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.engine import Engine
from pdserve.engine.grammar import GrammarCompiler
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.errors import GrammarFailed
from pdserve.grammar import CompiledGrammar, Vocabulary
from pdserve.node.grammar_queue import GrammarQueue
from tests.unit.engine.fakes import FakeRunner, decode_policy, make_request
from tests.unit.engine.test_engine import Observer

BLOCK = 4


class SlowCompiler:
    """Compiles when it may."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.error: GrammarFailed | None = None
        self.num_compiled = 0

    def __call__(self, vocabulary: Vocabulary, grammar: str) -> CompiledGrammar:
        assert self.may_end.wait(60)
        self.num_compiled += 1
        if self.error is not None:
            raise self.error
        return CompiledGrammar(vocabulary, None, is_light=True)  # type: ignore[arg-type]


class Bench:
    """A queue before a running engine with a fake model."""

    def __init__(self) -> None:
        self.slow = SlowCompiler()
        self.pool = BlockPool(64, BLOCK)
        queues = Queues(self.pool, ManualClock())
        self.engine = Engine(queues, decode_policy(16, 8), frozenset())
        compiler = GrammarCompiler(lambda: None, compile_one=self.slow)  # type: ignore[arg-type,return-value]
        self.queue = GrammarQueue(compiler, self.engine)
        self.observer = Observer()

    def submit(self, grammar_text: str = "", **fields: object) -> Request:
        request = make_request(5, max_tokens=6, **fields)
        request.sampling = structs.replace(request.sampling, grammar=grammar_text)
        self.queue.submit(request)
        return request

    async def end_of(self, request: Request) -> None:
        await self.observer.until(lambda: request.is_done)


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    bench = Bench()
    task = asyncio.create_task(bench.engine.run(FakeRunner(BLOCK), bench.observer))
    try:
        yield bench
    finally:
        bench.slow.may_end.set()
        await bench.queue.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        bench.pool.check_integrity()
        assert bench.pool.num_free == 64


async def test_other_streams_go_on_while_a_grammar_is_compiled() -> None:
    async with running() as bench:
        slow = bench.submit("big")
        for _ in range(3):  # one after the other
            await bench.end_of(bench.submit())
        assert (len(bench.queue), slow.output_token_ids) == (1, [])
        bench.slow.may_end.set()
        await bench.end_of(slow)
        assert len(bench.queue) == 0


async def test_a_grammar_that_fails_fails_its_request() -> None:
    async with running() as bench:
        bench.slow.error = GrammarFailed("too large")
        bench.slow.may_end.set()
        request, other = bench.submit("big"), bench.submit()
        await bench.observer.until(lambda: other.is_done and bench.observer.failed)
        assert bench.observer.failed == [(request, bench.slow.error)]


async def test_a_cancelled_request_is_not_submitted() -> None:
    async with running() as bench:
        request = bench.submit("big")
        bench.queue.cancel(request.request_id)
        bench.queue.cancel("unknown")
        bench.slow.may_end.set()
        await bench.end_of(bench.submit("another"))
        assert bench.engine.num_requests == 0
        assert bench.observer.failed == []


async def test_siblings_share_what_is_compiled_once() -> None:
    bench = Bench()
    bench.slow.may_end.set()
    request = bench.submit("big", siblings=[make_request(5), make_request(5)])
    async with asyncio.timeout(5):
        while len(bench.queue):
            await asyncio.sleep(0)
    assert bench.engine.num_requests == 1
    assert bench.slow.num_compiled == 1
    first, *others = (answer.grammar for answer in request.answers)
    assert first is not None
    assert others == [first, first]
    bench.engine.cancel(request.request_id)


@pytest.mark.parametrize("is_compiled", [True, False])
async def test_what_needs_no_compiling_is_submitted_at_once(is_compiled: bool) -> None:
    """A preempted request comes back with its grammar."""
    bench = Bench()
    grammar = CompiledGrammar(None, None, is_light=True) if is_compiled else None  # type: ignore[arg-type]
    request = bench.submit("big" if is_compiled else "", grammar=grammar)
    assert bench.engine.num_requests == 1
    bench.engine.cancel(request.request_id)
