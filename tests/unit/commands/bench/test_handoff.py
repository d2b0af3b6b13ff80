"""The handoff benchmark against a server that only pretends to serve."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from pdserve.commands.bench.handoff.config import HandoffBenchConfig
from pdserve.commands.bench.handoff.run import (
    HOPS,
    PARTS,
    HandoffLoad,
    HandoffReport,
    make_report,
    measure_handoff,
)
from pdserve.commands.cli.main import main
from pdserve.commands.cluster.scrape import parse
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import HandoffHops, PhaseTimes
from pdserve.shared.errors import ClusterError, ConfigError
from tests.fakes.http import serving

LOAD = HandoffLoad(concurrency=4, rounds=2, prompt_tokens=(8, 16), output_tokens=3)
TIMES = PhaseTimes(
    handoff_s=0.0105,
    handoff_copy_s=0.002,
    handoff_room_s=0.001,
    handoff_step_s=0.004,
    handoff_hops=HandoffHops(
        apply_s=0.0005,
        queue_s=0.00025,
        travel_s=0.00125,
        turn_s=0.002,
        pull_s=0.0022,
        adopt_s=0.0003,
    ),
)


@dataclass
class Server:
    """Says what it is asked for with one event; counts it in the coordinator's own metrics."""

    status: int = 200
    last: str = "data: [DONE]"
    was_handed_off: bool = True
    metrics: CoordinatorMetrics = field(default_factory=CoordinatorMetrics)
    bodies: list[dict[str, object]] = field(default_factory=list)

    async def complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.metrics.observe_decode_leg(TIMES, was_handed_off=self.was_handed_off)
        return web.Response(status=self.status, text=f"data: {{}}\n\n{self.last}\n\n")

    async def expose(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.exposition())

    def running(self) -> AbstractAsyncContextManager[str]:
        complete = web.post("/v1/completions", self.complete)
        return serving(complete, web.get("/metrics", self.expose))


async def measured(url: str) -> HandoffReport:
    return await measure_handoff(url, "m", url.removeprefix("http://"), LOAD, 20)


async def test_every_request_but_the_first_round_is_counted() -> None:
    server = Server()
    async with server.running() as url:
        report = await measured(url)
    assert (report.requests, report.concurrency, report.prompt_tokens) == (8, 4, [8, 16])
    assert len(server.bodies) == 12
    means = {row.part: row.mean_ms for row in report.rows}
    assert means == pytest.approx(
        {
            "waiting for room": 1,
            "waiting for the next step": 4,
            "messages": 3.5,
            "raw copy": 2,
            "all less the copy": 8.5,
            "all": 10.5,
        }
    )
    *hops, whole = (row.mean_ms for row in report.hops)
    assert hops == pytest.approx([0.5, 0.25, 1.25, 2, 2.2, 0.3, 4])
    assert sum(hops) == pytest.approx(whole)
    for row in (*report.rows, *report.hops):  # buckets are a factor of 1.2 wide
        assert row.mean_ms / 1.2 < row.p50_ms <= row.p90_ms <= row.p99_ms < row.mean_ms * 1.2


async def test_requests_are_of_the_wanted_size_and_share_no_prefix() -> None:
    server = Server()
    async with server.running() as url:
        await measured(url)
    for body in server.bodies:
        assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 3, True)
    counted = [body["prompt"] for body in server.bodies]
    assert {len(prompt) for prompt in counted} <= set(range(8, 17))
    assert len({tuple(prompt[:8]) for prompt in counted}) == len(counted)


async def test_a_refused_stream_is_told() -> None:
    async with Server(status=503).running() as url:
        with pytest.raises(ClusterError, match="a stream broke: 503"):
            await measured(url)


async def test_a_stream_that_breaks_after_its_first_byte_is_told() -> None:
    async with Server(last='data: {"error": "node_lost"}').running() as url:
        with pytest.raises(ClusterError, match="node_lost"):
            await measured(url)


async def test_a_cluster_without_handoffs_is_told() -> None:
    async with Server(was_handed_off=False).running() as url:
        with pytest.raises(ClusterError, match="no request was handed off"):
            await measured(url)


def test_the_parts_are_metrics_of_the_coordinator() -> None:
    look = parse(CoordinatorMetrics().exposition().decode())
    assert {*PARTS.values(), *HOPS.values()} <= set(look.buckets)
    with pytest.raises(ClusterError):
        make_report(look, look, LOAD)


def test_rounds_are_whole_ones() -> None:
    assert HandoffBenchConfig(concurrency=16, requests=100).rounds == 7
    assert HandoffBenchConfig(prompt_tokens=[5, 5]).prompt_range == (5, 5)


@pytest.mark.parametrize("tokens", [[5], [6, 5], [1, 2, 3]])
def test_a_range_is_two_numbers(tokens: list[int]) -> None:
    with pytest.raises(ConfigError, match="give the shortest and the longest"):
        _ = HandoffBenchConfig(prompt_tokens=tokens).prompt_range


def test_the_users_fault_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "handoff", "--prompt-tokens=9,8"]) == 2
    assert "--prompt-tokens 9,8" in capsys.readouterr().err
