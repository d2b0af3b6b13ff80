"""Requests whose prefix is fetched first: each is submitted once, or was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from pdserve.engine.request import Request
from pdserve.lifecycle import Lifecycle
from pdserve.node.prefixes.fetch import Fetched
from pdserve.node.prefixes.parts import Prefix
from pdserve.node.prefixes.queue import PrefixQueue
from pdserve.protocol import PrefixSource, SamplingParams

BLOCK = 4


class ScriptedFetcher:
    """Fetches until the test lets it end."""

    def __init__(self) -> None:
        self.prefixes: list[Prefix] = []
        self.may_end = asyncio.Event()
        self.has_use = True
        self.failure: Exception | None = None

    def could_fetch(self, prefix: Prefix, sources: Sequence[PrefixSource]) -> bool:
        return self.has_use

    async def fetch(self, prefix: Prefix, sources: Sequence[PrefixSource]) -> Fetched:
        self.prefixes.append(prefix)
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        return Fetched()


class Bench:
    def __init__(self) -> None:
        self.fetcher = ScriptedFetcher()
        self.submitted: list[str] = []
        self.queue = PrefixQueue(
            self.fetcher,  # type: ignore[arg-type]
            BLOCK,
            lambda request: self.submitted.append(request.request_id),
        )

    def submit(self, request_id: str, num_tokens: int = 13) -> None:
        self.queue.submit(make_request(request_id, num_tokens), [])


def make_request(request_id: str, num_tokens: int = 13) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(num_tokens)),
        sampling=SamplingParams(),
        lifecycle=Lifecycle(received_s=0.0),
    )


async def turn() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.queue.close()


async def test_a_request_follows_its_prefix(bench: Bench) -> None:
    bench.submit("r")
    await turn()
    assert bench.submitted == []
    assert len(bench.queue) == 1
    bench.fetcher.may_end.set()
    await turn()
    assert bench.submitted == ["r"]
    assert len(bench.queue) == 0


async def test_without_anything_to_fetch_it_is_submitted_at_once(bench: Bench) -> None:
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


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_cancelled_request_is_not_submitted(bench: Bench, is_over: bool) -> None:
    bench.submit("r")
    await turn()
    if is_over:
        bench.fetcher.may_end.set()
        await asyncio.sleep(0)  # the fetch may run to its end; nobody was told yet
    bench.queue.cancel("r")
    bench.submit("r")  # the id comes again while the first one ends
    bench.fetcher.may_end.set()
    await turn()
    assert bench.submitted == ["r"]
    bench.queue.cancel("r")  # too late: it is not known any more


async def test_closing_ends_every_fetch(bench: Bench) -> None:
    bench.submit("a")
    bench.submit("b")
    await turn()
    await bench.queue.close()
    await turn()
    assert bench.submitted == []
    assert len(bench.queue) == 0


async def test_a_recalled_request_is_submitted_once_its_answer_is_there_too(bench: Bench) -> None:
    request = make_request("r")
    request.output_token_ids = list(range(50, 58))
    told: list[str] = []
    assert bench.queue.recall(request, lambda _: told.append("fetched"))
    await turn()
    assert bench.fetcher.prefixes[0].token_ids == [*range(13), *range(50, 58)]
    assert len(bench.fetcher.prefixes[0].hashes) == 5
    assert bench.submitted == told == []
    bench.fetcher.may_end.set()
    await turn()
    assert bench.submitted == ["r"]
    assert told == ["fetched"]


async def test_with_nothing_to_fetch_nobody_is_recalled(bench: Bench) -> None:
    bench.fetcher.has_use = False
    assert not bench.queue.recall(make_request("r"), lambda _: None)
    assert bench.submitted == [], "it is where it was"
