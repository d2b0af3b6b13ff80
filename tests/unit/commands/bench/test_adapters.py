"""`pdserve bench adapters` against a server that only pretends to have some."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from pdserve.commands.bench.adapters.config import AdaptersBenchConfig, AdaptersReport, Turn
from pdserve.commands.bench.adapters.run import _Bench, remarks
from pdserve.shared.errors import ClusterError, ConfigError
from tests.fakes.http import serving


class Server:
    """Loads adapters, but for one, and answers those that are cold after the others."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.prompts: list[tuple[int, ...]] = []

    async def load(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name == "damaged":
            return web.Response(status=400, text="it is damaged")
        self.loaded.append(name)
        return web.Response()

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["model"] in self.loaded
        self.prompts.append(tuple(body["prompt"]))
        await asyncio.sleep(0.05 * body["model"].startswith("cold"))
        return web.Response(text="data: [DONE]\n\n")


async def test_cold_calls_are_compared_with_warm_ones_of_other_prompts() -> None:
    server = Server()
    routes = [
        web.post("/v1/load_lora_adapter", server.load),
        web.post("/v1/completions", server.complete),
    ]
    async with serving(*routes) as url:
        cluster = cast("Any", SimpleNamespace(url=url))
        bench = _Bench(AdaptersBenchConfig(deadline_s=20.0), cluster, "m")
        cold, hot = ["cold0", "cold1"], ["hot0"]
        await bench.load(Path("/folder"), cold + hot)
        assert sorted(server.loaded) == ["cold0", "cold1", "hot0"]
        warm_ms, cold_ms = await bench.call(cold, hot)
        assert len(set(server.prompts)) == 4, "none finds the KV of another"
        assert all(one >= 50.0 for one in cold_ms)
        assert len(warm_ms) == 2
        with pytest.raises(ClusterError, match="damaged is not loaded: it is damaged"):
            await bench.load(Path("/folder"), ["damaged"])


def test_what_is_said_is_of_pairs() -> None:
    turns = [Turn(9.0, 10.0), Turn(8.0, 10.0)]
    assert [turn.kept for turn in turns] == [0.9, 0.8]
    first, second = remarks(AdaptersReport(turns, turns, [10.0, 20.0], [30.0, 21.0], 1.5))
    assert "10 ms more than a warm one's (15 ms) in the median, 20 ms at most, of 2" in first
    assert second.endswith("1.5")


def test_adapters_that_would_all_have_a_place_are_refused() -> None:
    assert AdaptersBenchConfig().others == 972
    with pytest.raises(ConfigError, match="30 adapters, of which 20 should be cold"):
        _ = AdaptersBenchConfig(known=30).others
