"""What requests wait for before the engine has them: each is submitted once, or was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from pdserve.engine.engine import Engine
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Queues
from pdserve.node.prefixes.offers import Fetched, Prefix
from pdserve.node.preparation import Preparation
from pdserve.protocol import PrefixSource
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import GrammarFailed, PdserveError
from tests.fakes.runner import (
    FakeRunner,
    Observer,
    decode_policy,
)
from tests.requests import make_request
from tests.unit.node.compilers import SlowCompiler, a_grammar
from tests.waits import turn

BLOCK = 4
NUM_BLOCKS = 64


class ScriptedFetcher:
    """Fetches until the test lets it end."""

    def __init__(self) -> None:
        self.prefixes: list[Prefix] = []
        self.may_end = asyncio.Event()
        self.has_use = True
        self.is_fetching = False
        self.failure: Exception | None = None

    def could_fetch(
        self, prefix: Prefix, sources: Sequence[PrefixSource], *, is_here: bool = False
    ) -> bool:
        return self.has_use

    async def fetch(
        self, prefix: Prefix, sources: Sequence[PrefixSource], *, is_here: bool = False
    ) -> Fetched:
        if not self.has_use:
            return Fetched()
        self.prefixes.append(prefix)
        self.is_fetching = True
        try:
            await self.may_end.wait()
        finally:
            self.is_fetching = False
        if self.failure is not None:
            raise self.failure
        return Fetched(from_tier=8, from_nodes=4)


class Bench:
    """A preparation before an engine that runs when the test says so."""

    def __init__(self) -> None:
        self.fetcher = ScriptedFetcher()
        self.compiler = SlowCompiler()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.engine = Engine(Queues(self.pool, ManualClock()), decode_policy(64, 8), frozenset())
        self.preparation = Preparation(self.fetcher, self.compiler, self.engine)
        self.observer = Observer()

    def submit(self, request_id: str, num_tokens: int = 13, grammar: str = "") -> Request:
        request = make_request(num_tokens, max_tokens=6, request_id=request_id, grammar=grammar)
        self.preparation.submit(request, [])
        return request

    @property
    def submitted(self) -> list[str]:
        return [request.request_id for request in self.engine.queues.waiting]

    async def run(self) -> None:
        """The engine, until everything that it has is done, or has failed."""
        running = asyncio.create_task(self.engine.run(FakeRunner(BLOCK), self.observer))
        heard = self.observer
        await heard.until(lambda: not self.engine.num_requests and (heard.done or heard.failed))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.preparation.close()
    for request_id in bench.submitted:
        bench.engine.cancel(request_id)
    assert bench.pool.num_free == NUM_BLOCKS
    bench.pool.check_integrity()


# ---- prefixes ----------------------------------------------------------------------------------


async def test_a_request_follows_its_prefix(bench: Bench) -> None:
    bench.submit("r")
    await turn()
    assert bench.submitted == []
    assert len(bench.preparation) == 1
    bench.fetcher.may_end.set()
    await turn()
    assert bench.submitted == ["r"]
    assert len(bench.preparation) == 0


async def test_what_waits_for_nothing_is_submitted_at_once(bench: Bench) -> None:
    bench.fetcher.has_use = False
    bench.submit("r")
    assert bench.submitted == ["r"]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(12, 2), (13, 3), (16, 3), (4, 0)])
async def test_one_token_is_always_computed(bench: Bench, num_tokens: int, num_blocks: int) -> None:
    bench.submit("r", num_tokens)
    await turn()
    assert len(bench.fetcher.prefixes[0].hashes) == num_blocks


async def test_a_fetch_that_breaks_does_not_take_its_request_along(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.fetcher.failure = RuntimeError("a bug")
    bench.submit("r")
    bench.fetcher.may_end.set()
    await turn()
    assert bench.submitted == ["r"]
    assert "fetching a prefix for r failed" in caplog.text


# ---- grammars ----------------------------------------------------------------------------------


async def test_other_streams_go_on_while_a_grammar_is_compiled(bench: Bench) -> None:
    bench.fetcher.has_use = False
    slow = bench.submit("slow", grammar="big")
    for name in ("a", "b", "c"):  # one after the other
        other = bench.submit(name)
        await bench.run()
        assert other.is_done
    assert (len(bench.preparation), slow.output_token_ids) == (1, [])
    bench.compiler.gate.set()
    await turn()
    await bench.run()
    assert slow.is_done
    assert len(bench.preparation) == 0


async def test_a_grammar_is_compiled_while_the_prefix_is_fetched(bench: Bench) -> None:
    request = bench.submit("r", grammar="big")
    await turn()
    assert (bench.compiler.is_compiling, bench.fetcher.is_fetching) == (True, True)
    bench.compiler.gate.set()
    await turn()
    assert bench.submitted == []
    bench.fetcher.may_end.set()
    await turn()
    assert bench.submitted == ["r"]
    assert request.grammar is bench.compiler.grammar


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GrammarFailed("too large"), "too large"),
        (RuntimeError("a bug"), "its grammar failed: RuntimeError: a bug"),
    ],
)
async def test_a_grammar_that_fails_fails_its_request(
    bench: Bench, error: Exception, message: str
) -> None:
    """Nothing is fetched for it any more."""
    bench.compiler.error = error
    bench.compiler.gate.set()
    request = bench.submit("r", grammar="big")
    await turn()
    assert not bench.fetcher.is_fetching
    bench.fetcher.has_use = False
    other = bench.submit("other")
    await bench.run()
    assert other.is_done
    ((failed, reason),) = bench.observer.failed
    assert failed is request
    assert isinstance(reason, PdserveError)
    assert reason.message == message


async def test_siblings_share_what_is_compiled_once(bench: Bench) -> None:
    bench.compiler.gate.set()
    bench.fetcher.has_use = False
    request = make_request(5, siblings=[make_request(5), make_request(5)], grammar="big")
    bench.preparation.submit(request, [])
    await turn()
    assert bench.submitted == [request.request_id]
    assert bench.compiler.num_compiled == 1
    assert [answer.grammar for answer in request.answers] == [bench.compiler.grammar] * 3


async def test_a_grammar_is_not_compiled_again(bench: Bench) -> None:
    """A preempted request comes back with its grammar."""
    bench.fetcher.has_use = False
    request = make_request(5, grammar="big")
    request.grammar = a_grammar()
    bench.preparation.submit(request, [])
    assert bench.submitted == [request.request_id]


# ---- the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_cancelled_request_is_not_submitted(bench: Bench, is_over: bool) -> None:
    bench.submit("r")
    await turn()
    if is_over:
        bench.fetcher.may_end.set()
        await asyncio.sleep(0)  # the fetch may run to its end; nobody was told yet
    bench.preparation.cancel("r")
    bench.submit("r")  # the id comes again while the first one ends
    bench.fetcher.may_end.set()
    await turn()
    assert bench.submitted == ["r"]
    assert bench.engine.num_requests == 1


@pytest.mark.parametrize("stage", ["both", "grammar", "engine"])
async def test_one_cancel_ends_whatever_it_waits_for(bench: Bench, stage: str) -> None:
    if stage != "both":
        bench.fetcher.may_end.set()
    if stage == "engine":
        bench.compiler.gate.set()
    bench.submit("r", grammar="big")
    await turn()
    assert bench.submitted == (["r"] if stage == "engine" else [])
    bench.preparation.cancel("r")
    bench.preparation.cancel("unknown")
    await turn()
    assert bench.submitted == []
    assert not bench.compiler.is_compiling
    assert not bench.fetcher.is_fetching
    assert bench.engine.num_requests == 0
    assert bench.observer.failed == []


async def test_closing_ends_everything(bench: Bench) -> None:
    bench.submit("a")
    bench.submit("b", grammar="big")
    await turn()
    await bench.preparation.close()
    await turn()
    assert bench.submitted == []
    assert len(bench.preparation) == 0
    assert not bench.compiler.is_compiling


# ---- recalls -----------------------------------------------------------------------------------


async def test_a_recalled_request_is_submitted_once_its_answer_is_there_too(bench: Bench) -> None:
    request = make_request(13, output_token_ids=list(range(50, 58)), grammar="big")
    request.grammar = a_grammar()
    bench.preparation.recall(request)
    await turn()
    assert bench.fetcher.prefixes[0].prompt.token_ids == [*request.prompt_token_ids, *range(50, 58)]
    assert len(bench.fetcher.prefixes[0].hashes) == 5
    assert bench.submitted == []
    assert bench.preparation.prompts == [], "no prompt of it is to be computed"
    bench.fetcher.may_end.set()
    await turn()
    assert bench.submitted == [request.request_id]
    statistics = bench.engine.queues.preemptions.statistics
    assert (statistics.swapped_tokens, statistics.pulled_tokens) == (8, 4)
