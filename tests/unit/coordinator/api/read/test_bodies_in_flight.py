"""What arrives, and is not a call yet, takes bounded memory and leaves room for others."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from coordinator.api.completions import CompletionRequest
from coordinator.api.read.chat import ChatRequest
from coordinator.api.responses.requests import ResponseRequest
from coordinator.generation import GenerationRequest
from coordinator.tenants import Tenants
from tests.fakes.generator import MODEL, FakeGenerator, Pause, Step, says
from tests.unit.coordinator.api.harness import Harness, served
from tests.unit.coordinator.api.raw_client import RawClient, connected
from tests.unit.coordinator.api.test_tenants import bearer, clock, tenants, usage

__all__ = ["clock", "tenants", "usage"]  # fixtures

KIB = 2**10
HELLO = (
    "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    "Authorization: Bearer {key}\r\n"
    "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n\r\n"
)


def unfinished(key: str, num_bytes: int) -> bytes:
    """A chat whose last byte does not come."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {num_bytes + 1}\r\n\r\n"
    )
    return head.encode() + b" " * num_bytes


async def socket_of(client: RawClient, key: str) -> bytes:
    """Open a WebSocket; the answer's head."""
    client.writer.write(HELLO.format(key=key).encode())
    return await client.reader.readuntil(b"\r\n\r\n")


def unfinished_frame(num_bytes: int) -> bytes:
    """A text message of which half comes."""
    head = b"\x81\xff" + num_bytes.to_bytes(8, "big") + b"mask"
    return head + b" " * (num_bytes // 2)


async def reaches(api: Harness, num_bytes: int) -> None:
    async with asyncio.timeout(30):
        while api.server_context.bodies.num_bytes < num_bytes:
            await asyncio.sleep(0.001)


async def test_sixty_unfinished_bodies_fill_a_share_and_another_tenant_does_not_notice(
    tenants: Tenants,
) -> None:
    async with (
        served(tenants=tenants, max_buffered_bytes=2048 * KIB, slow_sender_s=0.0) as api,
        AsyncExitStack() as s,
    ):
        clients = [await s.enter_async_context(connected(api)) for _ in range(60)]
        for client in clients:
            client.writer.write(unfinished("night", 64 * KIB))
            await asyncio.sleep(0)
        await reaches(api, 15 * 64 * KIB)
        answers = [asyncio.create_task(client.reader.readuntil(b"}}")) for client in clients]
        async with api.chat(headers=bearer("acme-1")) as response:
            assert response.status == 200
        async with api.chat(headers=bearer("night"), slo_class="batch") as response:
            assert response.status == 200, "its own slow senders make room"
        assert api.server_context.bodies.num_bytes <= 1024 * KIB
        ended = [task.result() for task in answers if task.done()]
        assert len(ended) >= 60 - 16
        for answer in ended:
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"Retry-After" in answer
            assert b"buffers_full" in answer
        for task in answers:
            task.cancel()
    assert api.server_context.bodies.num_bytes == 0


async def test_a_call_holds_its_body_only_until_it_is_planned() -> None:
    held: list[int] = []

    def script(request: GenerationRequest) -> Sequence[Step]:
        held.append(api.server_context.bodies.num_bytes)
        return says("Hello")(request)

    async with served(FakeGenerator(script), max_buffered_bytes=64 * KIB) as api:
        for what in (api.chat(), api.complete()):
            async with what as response:
                assert response.status == 200
        async with api.client.post("/tokenize", json={"prompt": "x"}) as response:
            assert response.status == 200
        assert held == [0, 0]
        assert api.server_context.bodies.num_bytes == 0


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_a_running_call_keeps_nothing_of_its_body_that_it_does_not_need(path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {
            "messages": [{"role": "user", "content": "Hi"}],
            "chat_template_kwargs": {"x": [7] * 12_345},
        },
        "completions": {"prompt": ["Hi"]},
        "responses": {"input": [{"role": "user", "content": "Hi"}]},
    }

    def script(request: GenerationRequest) -> Sequence[Step]:
        return [Pause(until=may_end), *says("Hello")(request)]

    may_end = asyncio.Event()
    earlier = bodies_in_memory()  # of other tests
    async with served(FakeGenerator(script)) as api:
        call = asyncio.create_task(
            status_of(api.client.post(f"/v1/{path}", json={"model": MODEL, **bodies[path]}))
        )
        await api.generator.started.wait()
        await asyncio.sleep(0)
        found = [type(one) for one in bodies_in_memory() if all(one is not e for e in earlier)]
        may_end.set()
        assert await call == 200
    assert found == []


def bodies_in_memory() -> list[object]:
    schemas = (ChatRequest, CompletionRequest, ResponseRequest)
    return [one for one in gc.get_objects() if type(one) in schemas]


async def status_of(asking: Any) -> int:
    async with asking as response:
        return int(response.status)


async def test_a_body_that_waits_in_vain_is_told_when_to_come_again() -> None:
    async with (
        served(max_buffered_bytes=KIB, space_wait_s=0.01) as api,
        api.chat(user="x" * KIB) as response,
    ):
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert (await response.json())["error"]["code"] == "buffers_full"


async def test_a_websocket_has_no_compression() -> None:
    async with served() as api, connected(api) as client, asyncio.timeout(30):
        head = await socket_of(client, "")
        assert head.startswith(b"HTTP/1.1 101")
        assert b"deflate" not in head.lower()
        client.writer.write(b"\xc1\x84mask" + b"zzzz")  # compressed all the same
        assert b"reserved bits" in await client.read_until_broken() or client.reader.at_eof()


async def test_frames_are_counted_before_they_are_a_message() -> None:
    async with served(max_buffered_bytes=2048 * KIB) as api:
        async with connected(api) as client, asyncio.timeout(30):
            await socket_of(client, "")
            client.writer.write(unfinished_frame(1600 * KIB))
            await reaches(api, 800 * KIB)
        async with asyncio.timeout(30):
            while api.server_context.bodies.num_bytes:
                await asyncio.sleep(0.001)


async def test_a_websocket_without_room_is_told_so_and_closed(tenants: Tenants) -> None:
    async with served(tenants=tenants, max_buffered_bytes=128 * KIB) as api:
        async with connected(api) as client, asyncio.timeout(30):
            await socket_of(client, "night")
            client.writer.write(unfinished_frame(256 * KIB))
            told = await client.read_until(b"buffers_full")
            assert b'"status":503' in told
            assert api.server_context.bodies.num_bytes == 0
        async with api.chat(headers=bearer("acme-1")) as response:
            assert response.status == 200


async def test_messages_give_back_what_they_held() -> None:
    async with (
        served(max_buffered_bytes=256 * KIB) as api,
        api.client.ws_connect("/v1/responses") as socket,
    ):
        for _ in range(8):  # together far more than there is room for
            await ask(socket, 40 * KIB)
        async with asyncio.timeout(30):
            while api.server_context.bodies.num_bytes:
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("frame", [b"\x01\x80mask", b"\x81\x80mask", b"\x89\x80mask"])
async def test_tiny_frames_are_counted_before_they_are_objects(frame: bytes) -> None:
    """Fragments, messages and pings of no bytes at all."""
    async with served() as api, connected(api) as client, asyncio.timeout(30):
        client.writer.write(HELLO.format(key="").encode() + frame * 40_000)
        assert b"buffers_full" in await client.read_until(b"buffers_full")
        assert api.server_context.bodies.num_bytes == 0


async def ask(socket: aiohttp.ClientWebSocketResponse, num_bytes: int) -> None:
    whole = {"type": "response.create", "model": MODEL, "input": "Hi"}
    await socket.send_str(json.dumps(whole) + " " * num_bytes)
    async with asyncio.timeout(30):
        while (event := await socket.receive_json())["type"] != "response.completed":
            assert event["type"] != "error", event
