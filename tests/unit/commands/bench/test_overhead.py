"""`pdserve bench overhead` against a node that only pretends to compute."""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from pdserve.commands.bench.overhead.run import WatchedNode, measure_overhead
from pdserve.metrics import NodeMetrics
from pdserve.shared.errors import ClusterError
from tests.fakes.http import serving

STEPS = 10  # between two looks
OVERHEAD_S = 0.0004
MODEL_S = 0.003


@dataclass
class Server:
    """Computes some steps before each look, with so many streams in the batch as are listed; with
    the last of these looks the streams end."""

    running: list[int]
    last: str = "data: [DONE]"
    metrics: NodeMetrics = field(default_factory=NodeMetrics)
    num_looks: int = 0
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.metrics.watch("running_requests", "In the batch", lambda: self.in_batch)

    @property
    def in_batch(self) -> int:
        return self.running[min(self.num_looks, len(self.running)) - 1]

    async def complete(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: {}\n\n" * 1000)
        await self.is_over.wait()
        await response.write(f"{self.last}\n\n".encode())
        return response

    async def expose(self, request: web.Request) -> web.Response:
        self.num_looks += 1
        if self.num_looks <= len(self.running):
            for _ in range(STEPS):
                self.metrics.step_time.observe(MODEL_S)
                self.metrics.step_overhead.observe(OVERHEAD_S)
                self.metrics.batch_requests.observe(self.in_batch)
        if self.num_looks == len(self.running):
            self.is_over.set()
        return web.Response(body=self.metrics.exposition())

    def serving(self) -> AbstractAsyncContextManager[str]:
        complete = web.post("/v1/completions", self.complete)
        return serving(complete, web.get("/metrics", self.expose))


async def test_only_steps_of_the_whole_batch_count() -> None:
    async with Server(running=[1, 2, 2]).serving() as url:
        node = WatchedNode(url.removeprefix("http://"), os.getpid())
        row = await measure_overhead(url, ["m"], node, 2, 1000, 20)
    assert (row.batch, row.steps) == (2, STEPS)
    assert row.overhead_ms == pytest.approx(OVERHEAD_S * 1e3)
    assert row.model_ms == pytest.approx(MODEL_S * 1e3)


async def test_a_batch_that_was_never_together_is_told() -> None:
    async with Server(running=[1, 2]).serving() as url:
        node = WatchedNode(url.removeprefix("http://"), os.getpid())
        with pytest.raises(
            ClusterError, match="2 streams of 1000 tokens were never in the batch together"
        ):
            await measure_overhead(url, ["m"], node, 2, 1000, 20)


async def test_a_stream_that_breaks_is_told() -> None:
    async with Server([2, 2], last='data: {"error": "node_lost"}').serving() as url:
        node = WatchedNode(url.removeprefix("http://"), os.getpid())
        with pytest.raises(ClusterError, match="node_lost"):
            await measure_overhead(url, ["m"], node, 2, 1000, 20)
