"""The server's life: orderly end, time limits, and bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import resource

import aiohttp
import pytest

from coordinator.api import HttpServer, create_app
from coordinator.models.model import make_model
from pdserve.shared.errors import ConfigError
from tests.fakes.generator import (
    FakeGenerator,
    says,
    tiny_catalog,
    tiny_tokenizer,
    waits_for,
)
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import events_of, is_error_body, served
from tests.unit.coordinator.api.raw_client import chat_request, connected


async def test_requests_in_flight_may_end() -> None:
    gate = asyncio.Event()
    async with served(waits_for(gate)) as api:
        async with api.chat(stream=True) as streaming:
            await streaming.content.readuntil(b"Hello")
            async with api.client.get("/health") as response:  # leaves a connection behind
                assert response.status == 200
            stopping = asyncio.create_task(api.server.stop(grace_s=10))
            await asyncio.sleep(0.05)
            with pytest.raises(aiohttp.ClientConnectorError):
                async with aiohttp.ClientSession() as other:
                    await other.get(f"{api.server.url}/health")
            async with api.client.get("/health") as response:
                assert response.status == 503
            async with api.chat() as refused:
                assert refused.status == 503
                assert refused.headers["Connection"] == "close"
                assert "shutting down" in (await refused.json())["error"]["message"]
            assert not stopping.done()
            gate.set()
            assert (await streaming.read()).endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(30):
            await stopping


async def test_what_does_not_end_in_time_is_told_so() -> None:
    async with served(waits_for(asyncio.Event())) as api:
        async with api.chat(stream=True) as streaming:
            await streaming.content.readuntil(b"Hello")
            api.generator.started.clear()
            whole = asyncio.create_task(api.chat().__aenter__())
            await api.generator.started.wait()
            async with asyncio.timeout(30):
                await api.server.stop(grace_s=0.1)
            rest = await streaming.read()
        events = events_of(rest[rest.index(b"data: ") :])
        assert "shutting down" in events[-2]["error"]["message"]
        response = await whole
        assert response.status == 503
        await response.read()
        response.release()
    reasons = [generation.cancels for generation in api.generator.generations]
    assert reasons == [["coordinator is shutting down"]] * 2


async def test_somebody_in_a_hurry_may_cancel_the_stop() -> None:
    async with served(waits_for(asyncio.Event())) as api, api.chat(stream=True) as streaming:
        await streaming.content.readuntil(b"Hello")
        stopping = asyncio.create_task(api.server.stop(grace_s=60))
        await asyncio.sleep(0.05)
        stopping.cancel()
        async with asyncio.timeout(30):
            await asyncio.gather(stopping, return_exceptions=True)
        assert b"shutting down" in await streaming.read()


async def test_a_client_whose_headers_do_not_come_is_hung_up_on() -> None:
    async with served(idle_timeout_s=0.2) as api, connected(api) as client:
        client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
        async with asyncio.timeout(30):
            assert await client.read_until_broken() == b""


async def test_a_client_whose_body_does_not_come_is_told_so() -> None:
    async with served(body_timeout_s=0.2) as api, connected(api) as client:
        client.writer.write(chat_request()[:-3])
        async with asyncio.timeout(30):
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408")
            assert b"did not arrive" in await client.reader.readuntil(b"}}")


EXPECTING = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: {expected}\r\n"
    "Content-Type: {kind}\r\nContent-Length: {size}\r\n\r\n"
)


@pytest.mark.parametrize(
    ("expected", "kind", "size", "answer"),
    [
        ("100-continue", "application/json", 2001, b"HTTP/1.1 413"),
        ("100-continue", "text/plain", 10, b"HTTP/1.1 415"),
        ("miracles", "application/json", 10, b"HTTP/1.1 417"),
        ("100-Continue", "application/json", 10, b"HTTP/1.1 100"),
    ],
)
async def test_bodies_are_refused_before_they_are_sent(
    expected: str, kind: str, size: int, answer: bytes
) -> None:
    async with served(max_body_bytes=2000) as api, connected(api) as client:
        client.writer.write(EXPECTING.format(expected=expected, kind=kind, size=size).encode())
        async with asyncio.timeout(30):
            assert (await client.reader.readuntil(b"\r\n")).startswith(answer)


async def test_a_client_with_one_connection_too_many_is_turned_away() -> None:
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with served(max_connections=1) as api, connected(api) as first, asyncio.timeout(30):
        first.writer.write(request)
        assert (await first.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        async with connected(api) as second:
            second.writer.write(request)
            assert await second.read_until_broken() == b""
        first.writer.write(request)
        assert b'"version"' in await first.reader.readuntil(b"}")


async def test_a_file_limit_that_turns_clients_away_is_told_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        await check_what_is_told(caplog)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def check_what_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with served(max_connections=500):
        assert not caplog.records
    async with served(max_connections=1000):
        (record,) = caplog.records
    assert "1024 open files leaves room for 768 client connections" in record.getMessage()
    assert "to 1256 for all 1000" in record.getMessage()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("version", "connection", "stays"),
    [
        ("1.0", "keep-alive", {False}),  # a stream's end cannot be told otherwise
        ("1.0", "", set()),
        ("1.1", "close", set()),
        ("1.1", "", {True, False}),
    ],
)
async def test_a_connection_ends_when_its_client_has_to_know_that_an_answer_did(
    version: str, connection: str, stays: set[bool], stream: bool
) -> None:
    line = f"HTTP/{version}\r\n" + (f"Connection: {connection}\r\n" if connection else "")
    request = chat_request(stream=stream).replace(b"HTTP/1.1\r\n", line.encode(), 1)
    async with served(FakeGenerator(says("Hello"))) as api, connected(api) as client:
        client.writer.write(request)
        async with asyncio.timeout(30):
            if stream in stays:
                end = b"[DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}"
                head = await client.read_until(end)
                client.writer.write(request.replace(b"keep-alive", b"close"))
                assert b"Hello" in await client.read_until(end), "another answer"
            else:
                head = await client.read_until_broken()
    assert head.startswith(f"HTTP/{version} 200".encode())
    assert b"Hel" in head


async def test_long_answers_outlive_the_idle_limit() -> None:
    generator = FakeGenerator(says("one two three four five six", pause_s=0.08))
    async with served(generator, idle_timeout_s=0.2) as api, api.chat(stream=True) as response:
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"\x00" * 1000,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nX: \xff\xfe\r\n\r\n",
    b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Expect: miracles\r\nContent-Length: 0\r\n\r\n",
]


@pytest.mark.parametrize("raw", matrix(GARBAGE, 5))
async def test_garbage_is_harmless(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with served(idle_timeout_s=0.3) as api:
        async with connected(api) as client:
            client.writer.write(raw)
            async with asyncio.timeout(30):
                answer = await client.read_until_broken()
        if not answer.startswith(b"HTTP/1.1 200"):
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.split()[1][:1] == b"4"
            assert b"\r\nx-request-id: req-" in head
            assert is_error_body(json.loads(body))
        async with api.client.get("/health") as response:
            assert response.status == 200
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_a_taken_port_is_a_configuration_error() -> None:
    async with served() as api:
        app = create_app(tiny_catalog())
        with pytest.raises(ConfigError, match="cannot listen"):
            await HttpServer(app, port=api.server.port).start()


async def test_a_large_body_within_the_limit() -> None:
    async with served(FakeGenerator(max_model_len=10**8)) as api:
        messages = [{"role": "user", "content": "word " * 100_000}]
        async with api.chat(messages=messages, max_tokens=5) as response:
            assert response.status == 200
            body = json.loads(await response.read())
    assert body["usage"]["prompt_tokens"] > 100_000


def test_a_model_needs_a_name() -> None:
    with pytest.raises(ValueError, match="name"):
        make_model(FakeGenerator(), tiny_tokenizer(), [])
