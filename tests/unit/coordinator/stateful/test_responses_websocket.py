"""Responses over a WebSocket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.tenants import Tenants
from coordinator.tenants.key_book import LOOK_S
from pdserve.settings.access import hash_key
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import NodeLost, Overloaded
from tests.fakes.generator import (
    MODEL,
    FakeGenerator,
    Tokens,
    tiny_tokenizer,
    tool_tokenizer,
    waits_for,
)
from tests.unit.coordinator.api.harness import Harness, served, tail_of_prompt
from tests.unit.coordinator.api.test_tenants import bearer, clock, tenants, usage

__all__ = ["clock", "tenants", "usage"]  # fixtures

ENDS = ("response.completed", "response.failed", "response.incomplete", "error")
Socket = aiohttp.ClientWebSocketResponse


def connected(api: Harness, **how: Any) -> Any:
    return api.client.ws_connect("/v1/responses", **how)


async def turn(socket: Socket, **body: Any) -> list[Any]:
    """What is answered."""
    await socket.send_json({"type": "response.create", "model": MODEL, "input": "Hi"} | body)
    return await rest_of_turn(socket)


async def rest_of_turn(socket: Socket) -> list[Any]:
    told: list[Any] = []
    async with asyncio.timeout(30):
        while not told or told[-1]["type"] not in ENDS:
            told.append(await socket.receive_json())
    return told


def error_of(told: list[Any]) -> tuple[int, str, str | None]:
    (message,) = told
    assert set(message) == {"type", "status", "error"}
    assert message["error"]["message"]
    return message["status"], message["error"]["code"], message["error"]["param"]


async def test_a_response_comes_as_the_events_of_a_stream() -> None:
    async with served() as api, connected(api) as socket:
        told = await turn(socket)
        asked = {"model": MODEL, "input": "Hi", "stream": True}
        async with api.client.post("/v1/responses", json=asked) as response:
            frames = (await response.text()).split("\n\n")[:-1]
        before = {"previous_response_id": told[-1]["response"]["id"], "stream": True}
        again = await turn(socket, input="And?", background=False, **before)
    assert [event["type"] for event in told] == [
        frame.split("\n")[0].removeprefix("event: ") for frame in frames
    ]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == "Hello world"
    assert again[-1]["response"]["previous_response_id"] == told[-1]["response"]["id"]
    assert [summary.status for summary in api.observer.finished] == [200, 200, 200]
    assert (
        api.observer.finished[0].num_completion_tokens
        == told[-1]["response"]["usage"]["output_tokens"]
    )


async def test_what_is_not_stored_is_gone_on_from_in_its_connection() -> None:
    async with served(None, tool_tokenizer()) as api, connected(api) as socket:
        first = (await turn(socket, store=False))[-1]["response"]
        second = (await turn(socket, store=False, input="B", previous_response_id=first["id"]))[-1]
        assert tail_of_prompt(api) == ("<|user|>Hi<|assistant|>Hello world<|user|>B<|assistant|>")
        stale = await turn(socket, store=False, previous_response_id=first["id"])
        assert error_of(stale) == (404, "previous_response_not_found", "previous_response_id")
        latest = {"store": False, "previous_response_id": second["response"]["id"]}
        gone = await turn(socket, **latest)
        assert error_of(gone)[1] == "previous_response_not_found", "a failure forgets it"
        async with api.client.get(f"/v1/responses/{first['id']}") as response:
            assert response.status == 404
        third = (await turn(socket, store=False))[-1]["response"]
        async with connected(api) as other:
            elsewhere = await turn(other, previous_response_id=third["id"])
            assert error_of(elsewhere)[1] == "previous_response_not_found"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"type": "response.cancel"}, "type"),
        ({"stream": False}, "stream"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_what_cannot_be_is_refused_and_the_connection_goes_on(
    body: dict[str, Any], param: str
) -> None:
    async with served() as api, connected(api) as socket:
        assert error_of(await turn(socket, **body)) == (400, "invalid_request", param)
        for text in ("{", "[]"):
            await socket.send_str(text)
            assert error_of(await rest_of_turn(socket))[0] == 400
        assert (await turn(socket))[-1]["type"] == "response.completed"


async def test_failures_are_told_before_and_after_the_first_event() -> None:
    ids = tiny_tokenizer().encode("Hello", add_special_tokens=False)
    generator = FakeGenerator(lambda _: [Tokens(ids), NodeLost("decode-0 is gone")])
    async with served(generator) as api, connected(api) as socket:
        last = (await turn(socket))[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "node_lost"
        generator.start_error = Overloaded("busy", 3.0)
        assert error_of(await turn(socket))[0] == 429
    assert [summary.status for summary in api.observer.finished] == [502, 429]


async def test_a_client_that_goes_away_ends_its_call() -> None:
    async with served(waits_for(asyncio.Event())) as api:
        async with connected(api) as socket:
            await socket.send_json({"type": "response.create", "model": MODEL, "input": "Hi"})
            assert (await socket.receive_json())["type"] == "response.created"
        async with asyncio.timeout(30):
            await api.observer.over.wait()
        assert len(api.generator.last.cancels) == 1
        assert [summary.status for summary in api.observer.finished] == [499]


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_stop_is_told(is_busy: bool) -> None:
    gate = asyncio.Event()
    async with served(waits_for(gate)) as api, connected(api) as socket:
        if is_busy:
            await socket.send_json({"type": "response.create", "model": MODEL, "input": "Hi"})
            await socket.receive_json()
        stopping = asyncio.create_task(api.server.stop(grace_s=10))
        if is_busy:
            gate.set()
            assert (await rest_of_turn(socket))[-1]["type"] == "response.completed"
        status, _, _ = error_of([await socket.receive_json()])
        assert status == 503
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        await stopping


async def test_a_connection_has_its_time() -> None:
    async with served(socket_age_s=0.0) as api, connected(api) as socket:
        told = await rest_of_turn(socket)
        assert error_of(told)[1] == "websocket_connection_limit_reached"


async def test_it_is_for_those_with_a_key_and_for_sockets(tenants: Any) -> None:
    async with served(tenants=tenants) as api:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await connected(api)
        assert refused.value.status == 401
        async with connected(api, headers=bearer("acme-1")) as socket:
            assert (await turn(socket))[-1]["type"] == "response.completed"
        async with api.client.get("/v1/responses", headers=bearer("acme-1")) as response:
            assert response.status == 426


async def test_each_message_is_a_call_of_its_own_to_its_tenant(
    tenants: Tenants, tmp_path: Path, clock: ManualClock
) -> None:
    def remaining(key: str) -> str:
        return tenants.headers(tenants.identify(key))["x-ratelimit-remaining-tokens"]

    async with served(tenants=tenants) as api, connected(api, headers=bearer("acme-1")) as socket:
        assert (await turn(socket))[-1]["type"] == "response.completed"
        after_one = remaining("acme-1")
        assert int(after_one) < 1000
        assert error_of(await turn(socket, temperature=-1))[0] == 400
        assert remaining("acme-1") == after_one, "only its own prompt is given back"
        (tmp_path / "keys.toml").write_text(f'[tenants.a]\nkeys = ["{hash_key("a")}"]')
        clock.advance(LOOK_S)
        assert error_of(await turn(socket))[:2] == (401, "invalid_api_key")


async def test_pages_of_other_origins_are_kept_out() -> None:
    origins = ("https://ours.example",)
    async with served(cors_origins=origins) as api:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await connected(api, origin="https://theirs.example")
        assert refused.value.status == 403
        its_name = {"Host": "theirs.example:8000"}  # for this server
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await connected(api, origin="http://theirs.example:8000", headers=its_name)
        assert refused.value.status == 403
        for origin in (*origins, api.server.url):
            async with connected(api, origin=origin) as socket:
                assert (await turn(socket))[-1]["type"] == "response.completed"


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_client_that_answers_no_ping_is_given_up(is_busy: bool) -> None:
    api_of = served(waits_for(asyncio.Event()), keep_alive_s=0.02, stall_timeout_s=0.06)
    async with api_of as api, connected(api, autoping=False) as socket:
        if is_busy:
            await socket.send_json({"type": "response.create", "model": MODEL, "input": "Hi"})
        async with asyncio.timeout(30):
            kinds: list[aiohttp.WSMsgType] = []
            while not socket.closed:
                kinds.append((await socket.receive()).type)
            num_pings = kinds.count(aiohttp.WSMsgType.PING)
            assert num_pings == 3 or (is_busy and num_pings > 3), "some came before it was heard"
            if is_busy:
                assert aiohttp.WSMsgType.TEXT in kinds
                await api.observer.over.wait()
                assert len(api.generator.last.cancels) == 1


async def test_a_client_that_answers_pings_may_be_silent() -> None:
    api_of = served(keep_alive_s=0.02, stall_timeout_s=0.06)
    async with api_of as api, connected(api, autoping=False) as socket:
        for _ in range(8):
            async with asyncio.timeout(30):
                assert (await socket.receive()).type is aiohttp.WSMsgType.PING
            await socket.pong()
        await socket.ping(b"there?")
        told: list[aiohttp.WSMessage] = []
        async with asyncio.timeout(30):
            while not told or told[-1].type is aiohttp.WSMsgType.PING:
                told.append(await socket.receive())
        assert (told[-1].type, told[-1].data) == (aiohttp.WSMsgType.PONG, b"there?")


async def test_a_message_that_waits_for_its_turn_is_no_silence() -> None:
    gate = asyncio.Event()
    api_of = served(waits_for(gate), keep_alive_s=0.02, stall_timeout_s=0.06)
    async with api_of as api, connected(api, autoping=False) as socket:
        for _ in range(2):
            await socket.send_json({"type": "response.create", "model": MODEL, "input": "Hi"})
        num_pings = 0
        async with asyncio.timeout(30):
            while num_pings < 6:
                num_pings += (await socket.receive()).type is aiohttp.WSMsgType.PING
        gate.set()
        ends: list[str] = []
        async with asyncio.timeout(30):
            while len(ends) < 2:
                message = await socket.receive()
                if message.type is aiohttp.WSMsgType.TEXT:
                    ends += [kind for kind in (message.json()["type"],) if kind in ENDS]
        assert ends == ["response.completed"] * 2
