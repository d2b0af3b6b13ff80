"""Coordinators under load: the cheap server, the cheap client, and what rounds come to."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from coordinator.tracing.otlp import OtlpTracing
from pdserve.commands.bench.coordinator.chat_stream import ChatTarget, chat_target
from pdserve.commands.bench.coordinator.config import Chats, CoordinatorBenchConfig, CoordinatorPlan
from pdserve.commands.bench.coordinator.load import LoadRound, Look, MeasuredServer
from pdserve.commands.bench.coordinator.measurement import (
    PLAIN,
    TRACED,
    coordinator_row,
    measure_servers,
    traced_row,
)
from pdserve.commands.bench.coordinator.otlp_collector import collecting
from pdserve.commands.bench.coordinator.simulated_node import Beat
from pdserve.commands.bench.coordinator.sse_server import MODEL, SseServer
from pdserve.commands.bench.cpu_time import cpu_seconds, starved_seconds
from pdserve.commands.bench.load.outcome import Outcome
from pdserve.commands.bench.serve.config import Load
from pdserve.settings.tracing import TracingConfig
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ClusterError, ConfigError
from tests.fakes.http import serving

NO_PROCESS = 1 << 30
TWO_STREAMS = Chats(4, 3, Load(concurrency=2))


@asynccontextmanager
async def simulated() -> AsyncIterator[str]:
    beat = Beat(0.001)
    server = await SseServer(beat).start(0)
    beat.start()
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[str]:
    """Whatever is asked is answered with these bytes, and then the connection is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def asked(num_output: int) -> Outcome:
    return Outcome(kind="chat", due_s=0.0, num_prompt=1, num_output=num_output, arrivals_s=[])


async def outcome_of(target: ChatTarget, num_output: int = 3) -> Outcome:
    outcome = asked(num_output)
    async with asyncio.timeout(30):
        await target.send(target.request("hello", num_output), outcome, time.perf_counter())
    return outcome


async def test_the_server_streams_what_was_asked_for_over_one_connection() -> None:
    async with simulated() as url, chat_target(url, MODEL) as target:
        for num_output in (1, 3, 5):
            outcome = await outcome_of(target, num_output)
            assert (outcome.end, outcome.error) == ("finished", "")
            assert outcome.num_received == num_output
            assert 1 <= len(outcome.arrivals_s) <= num_output
            assert 0 < outcome.sent_s <= outcome.arrivals_s[0]


async def test_the_server_is_an_openai_api_as_far_as_others_need_one() -> None:
    async with simulated() as url, aiohttp.ClientSession(url) as client:
        async with client.get("/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == MODEL
        body = {"model": MODEL, "messages": [], "max_tokens": 2}
        async with client.post("/v1/chat/completions", json=body) as response:
            whole = await response.json()
        assert whole["choices"][0]["message"]["content"] == " token token"
        assert whole["usage"]["completion_tokens"] == 2
        async with client.post("/v1/chat/completions", json=body | {"stream": True}) as response:
            *events, end, nothing = (await response.text()).split("\n\n")
        assert (end, nothing) == ("data: [DONE]", "")
        deltas = [json.loads(event.removeprefix("data: "))["choices"] for event in events]
        texts = [choice[0]["delta"].get("content") for choice in deltas if choice]
        assert texts == ["", " token", " token", None]
        async with client.post("/v1/chat/completions", data=b"{") as response:
            assert response.status == 400


OK_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content": "a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
REFUSAL = b'{"error":{"message":"no","code":"overloaded"}}'


@pytest.mark.parametrize(
    ("pieces", "end", "error"),
    [
        ([OK_HEAD + ROLE, TOKEN[:20], TOKEN[20:], TOKEN, USAGE + b"0\r\n\r\n"], "finished", ""),
        ([OK_HEAD[:9], OK_HEAD[9:] + ROLE, TOKEN, TOKEN, USAGE], "finished", ""),
        ([OK_HEAD, TOKEN], "failed", "200 the stream broke off"),
        ([OK_HEAD, TOKEN, USAGE.replace(b"2", b"1")], "failed", "the stream had 1 tokens"),
        ([b"HTTP/1.1 429 No\r\n\r\n" + REFUSAL], "refused", "429 overloaded"),
        ([b"HTTP/1.1 500 No\r\n\r\n" + REFUSAL], "failed", "500 overloaded"),
        ([b"who are you?\r\n\r\n"], "failed", "-1 the stream broke off"),
        ([], "failed", "0 the stream broke off"),
    ],
)
async def test_how_an_answer_ends(pieces: list[bytes], end: str, error: str) -> None:
    async with answering(*pieces) as url, chat_target(url, "m") as target:
        outcome = await outcome_of(target, num_output=2)
    assert (outcome.end, outcome.error) == (end, error)


async def test_token_1_is_the_first_text_and_not_the_role() -> None:
    gate = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(ROLE)
        await gate.wait()
        await response.write(TOKEN + USAGE)
        return response

    async with (
        serving(web.post("/v1/chat/completions", answer)) as url,
        chat_target(url, "m") as target,
    ):
        outcome = asked(2)
        request = target.request("hello", 2)
        sending = asyncio.create_task(target.send(request, outcome, time.perf_counter()))
        await asyncio.wait([sending], timeout=0.05)
        assert outcome.arrivals_s == []
        gate.set()
        await sending
        assert len(outcome.arrivals_s) == 1


async def test_what_is_no_server_is_told() -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        ChatTarget("https://127.0.0.1:1", "m")
    with pytest.raises(ClusterError, match="cannot be reached"):
        await outcome_of(ChatTarget("http://127.0.0.1:1", "m"))


async def test_loads_are_closed_loops_or_rates() -> None:
    at_a_rate = Chats(4, 3, Load(rate=50.0))
    plan = CoordinatorPlan([TWO_STREAMS, at_a_rate], duration_s=0.3, drain_s=10, rounds=2)
    async with simulated() as url, chat_target(url, MODEL) as target:
        server = MeasuredServer("same", target, os.getpid())
        report = await measure_servers([server], MeasuredServer("direct", target), plan)
    full, paced = report.rows
    assert (full.concurrency, full.rate, paced.concurrency, paced.rate) == (2, 0.0, 0, 50.0)
    assert full.tokens_per_s == pytest.approx(3 * full.requests_per_s)
    assert paced.sent == 2 * 15, "of two rounds, whatever became of those before them"
    for row in report.rows:
        assert (row.server, row.output_tokens, row.failed, row.errors) == ("same", 3, 0, {})
        assert row.added_ttft_ms.p50 is not None
        assert row.client_late_ms.p50 is not None
        assert row.beside_share > 0


@pytest.mark.long
async def test_servers_take_turns_and_traces_are_compared_round_by_round() -> None:
    said: list[str] = []
    plan = CoordinatorPlan([TWO_STREAMS], duration_s=0.2, drain_s=10, rounds=2)
    async with simulated() as url, chat_target(url, MODEL) as target:
        servers = [MeasuredServer(name, target, os.getpid()) for name in (PLAIN, TRACED)]
        direct = MeasuredServer("direct", target)
        report = await measure_servers(servers, direct, plan, said.append)
    who = [text.split(", ")[2] for text in said]
    assert who == [PLAIN, TRACED, TRACED, PLAIN]
    assert [row.output_tokens for row in report.traced] == [TWO_STREAMS.output_tokens]


async def test_a_collector_counts_what_comes_and_misses_what_does_not() -> None:
    async with collecting() as collector:
        with pytest.raises(ClusterError, match="no trace and no metrics arrived"):
            collector.check()
        tracing = OtlpTracing(TracingConfig(otlp_endpoint=collector.url), "m", ManualClock())
        await asyncio.to_thread(tracing.close)
        with pytest.raises(ClusterError, match="no trace arrived"):
            collector.check()
        assert collector.num_bytes["metrics"] > 0


async def test_a_server_that_does_not_serve_is_an_error() -> None:
    plan = CoordinatorPlan([TWO_STREAMS], duration_s=0.2, drain_s=10, rounds=1)
    async with answering(b"HTTP/1.1 500 No\r\n\r\n" + REFUSAL) as url, chat_target(url, "m") as one:
        with pytest.raises(ClusterError, match=r"broken at .* did not serve: 500 overloaded"):
            await measure_servers(
                [MeasuredServer("broken", one)], MeasuredServer("direct", one), plan
            )


def finished(first_s: float, last_s: float) -> Outcome:
    outcome = asked(10)
    outcome.arrivals_s = [first_s, last_s]
    outcome.num_received, outcome.end = 10, "finished"
    return outcome


def test_what_counts_is_in_the_window() -> None:
    outcomes = [finished(0.0, 2.0), finished(1.5, 2.5), finished(4.0, 5.0), asked(10)]
    window = LoadRound(outcomes, Look(1.0, 10.0, 3.0, 7.0), Look(3.0, 11.0, 3.5, 7.5))
    assert window.num_tokens == 15.0  # half of the first, all of the second, none of the third
    assert window.num_requests == 1.5
    row = coordinator_row(TWO_STREAMS, "g", [(window, LoadRound(outcomes, Look(1.0), Look(3.0)))])
    assert (row.tokens_per_s, row.tokens_per_core_s) == (7.5, 15.0)
    assert (row.core_share, row.starved_share) == (0.5, 0.25)
    assert row.beside_share == 0.25
    assert row.tokens_per_event == 5.0
    assert (row.sent, row.failed) == (4, 1)
    assert row.added_ttft_ms.p50 == 0.0


def test_the_cost_of_traces_is_that_of_a_request_in_neighbouring_rounds() -> None:
    def window(cpu_s: float) -> LoadRound:
        return LoadRound([finished(0.0, 1.0)], Look(0.0), Look(1.0, cpu_s))

    plain, traced = [window(1.0), window(2.0), window(4.0)], [window(1.1), window(2.0), window(4.2)]
    row = traced_row(TWO_STREAMS, plain, traced)
    assert row.ratios == pytest.approx([1.1, 1.0, 1.05])
    assert row.median == pytest.approx(1.05)
    assert traced_row(TWO_STREAMS, [window(0.0)], [window(1.0)]).median is None, "idle"


def test_a_process_that_is_not_known_has_no_seconds() -> None:
    window = LoadRound([finished(0.0, 1.0)], Look(0.0), Look(1.0))
    row = coordinator_row(TWO_STREAMS, "g", [(window, window)])
    assert (row.core_share, row.starved_share, row.tokens_per_core_s) == (None, None, None)


def test_seconds_of_a_process() -> None:
    assert 0 < cpu_seconds(os.getpid()) <= time.process_time() + 0.02  # it counts in ticks
    assert starved_seconds(os.getpid()) >= 0
    for seconds in (cpu_seconds, starved_seconds):
        with pytest.raises(ClusterError, match="no process"):
            seconds(NO_PROCESS)


def test_full_loads_come_first_and_then_a_rate() -> None:
    said = [str(chats) for chats in CoordinatorBenchConfig().plan.cases]
    assert said == [
        "answers of 256, 128 at a time",
        "answers of 2, 128 at a time",
        "answers of 40, 250/s",
    ]
    assert len(CoordinatorBenchConfig(rate=0).plan.cases) == 2
    with pytest.raises(ConfigError, match="nothing to measure"):
        _ = CoordinatorBenchConfig(output_tokens=[], rate=0).plan
