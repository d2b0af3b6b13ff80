"""Clients that go away, stop reading or take their time; on both event loops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import pytest
import tokenizers
import uvloop

from coordinator.text import Tokenizer
from pdserve.protocol import FinishReason
from tests.fakes.generator import (
    EOS,
    FakeGenerator,
    Pause,
    Step,
    Tokens,
    says,
    tiny_tokenizer,
)
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import Harness, events_of, served
from tests.unit.coordinator.api.raw_client import chat_request, connected, post
from tests.unit.coordinator.text import made_tokenizers as made

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
PROMPT_S = 1.0  # generous for a busy machine; what is measured is milliseconds
LONG_TOKEN_CHARS = 20_000


def hangs_after(text: str) -> FakeGenerator:
    """Says `text` and then nothing for ever."""
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    return FakeGenerator(lambda _: [Tokens([i]) for i in ids] + [Pause(until=asyncio.Event())])


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Any:
    @pytest.mark.parametrize("loop", matrix(LOOPS, {"uvloop"}))
    def run(loop: str) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(20):
                await test()

        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(bounded())

    return run


async def expect_cancel(api: Harness, reason: str) -> None:
    """The generation is cancelled once, at once, and the call is counted."""
    async with asyncio.timeout(PROMPT_S):
        await api.observer.over.wait()
    assert api.generator.last.cancels == [reason]
    assert api.observer.finished[0].status == 499
    assert api.observer.finished[0].error_code == "client_disconnected"


@on_both_loops
async def test_leaving_in_mid_stream() -> None:
    async with served(hangs_after("Hello world")) as api, connected(api) as client:
        client.writer.write(chat_request(stream=True))
        await client.reader.readuntil(b" world")
        await client.close()
        await expect_cancel(api, "client disconnected")


@on_both_loops
async def test_crashing_in_mid_stream() -> None:
    async with served(hangs_after("Hello world")) as api, connected(api) as client:
        client.writer.write(chat_request(stream=True))
        await client.reader.readuntil(b" world")
        await client.reset()
        await expect_cancel(api, "client disconnected")


@on_both_loops
async def test_leaving_before_the_first_token() -> None:
    async with served(hangs_after("")) as api, connected(api) as client:
        client.writer.write(chat_request(stream=True))
        await api.generator.started.wait()
        await client.close()
        await expect_cancel(api, "client disconnected")


@on_both_loops
async def test_leaving_while_waiting_for_a_whole_answer() -> None:
    async with served(hangs_after("Hello")) as api, connected(api) as client:
        client.writer.write(chat_request())
        await api.generator.started.wait()
        await client.close()
        await expect_cancel(api, "client disconnected")


@on_both_loops
async def test_leaving_cancels_every_prompt_of_a_call() -> None:
    async with served(hangs_after("Hello")) as api, connected(api) as client:
        client.writer.write(post("/v1/completions", {"model": "alias", "prompt": ["a", "b"]}))
        await api.generator.started.wait()
        await client.close()
        await api.observer.over.wait()
        assert [g.cancels for g in api.generator.generations] == [["client disconnected"]] * 2


@on_both_loops
async def test_leaving_while_sending_the_body() -> None:
    async with served() as api, connected(api) as client:
        client.writer.write(chat_request()[:-5])
        await client.writer.drain()
        await asyncio.sleep(0.05)
        await client.close()
        await api.observer.over.wait()
        assert api.observer.finished[0].status == 499
        async with api.chat() as response:
            assert response.status == 200


@cache
def tokenizer_with_a_long_token() -> tuple[Tokenizer, int]:
    backend = tokenizers.Tokenizer.from_str(made.byte_level_json())
    backend.add_tokens(["x" * LONG_TOKEN_CHARS])
    tokenizer = Tokenizer(backend, chat_template=tiny_tokenizer().chat_template)
    return tokenizer, tokenizer.num_ids - 1


def floods(num_tokens: int, *, ends: bool = True) -> FakeGenerator:
    _, long_id = tokenizer_with_a_long_token()
    steps: list[Step] = [Tokens([long_id]), Pause()] * num_tokens
    if not ends:
        steps.append(Pause(until=asyncio.Event()))
    steps.append(Tokens([EOS], FinishReason.STOP, EOS))
    return FakeGenerator(lambda _: steps, max_model_len=10**6)


FLOOD = {"model": "alias", "prompt": "x", "stream": True, "max_tokens": 10**5}
UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\n"
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)


def text_frame(text: bytes) -> bytes:
    """Of a client; its mask is all zeros, which changes nothing."""
    assert len(text) < 126
    return bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text


@on_both_loops
async def test_a_reader_that_stops_is_given_up() -> None:
    tokenizer, _ = tokenizer_with_a_long_token()
    async with (
        served(floods(1000), tokenizer, stall_timeout_s=0.3) as api,
        connected(api, receive_buffer=4096) as client,
    ):
        client.writer.write(post("/v1/completions", FLOOD))
        await api.observer.over.wait()
        assert api.observer.finished[0].error_code == "client_disconnected"
        raw = await client.read_until_broken()
        assert b"[DONE]" not in raw


@on_both_loops
async def test_a_socket_that_is_not_read_is_given_up() -> None:
    tokenizer, _ = tokenizer_with_a_long_token()
    ask = {"type": "response.create", "model": "alias", "input": "x"}
    async with (
        served(floods(1000, ends=False), tokenizer, stall_timeout_s=0.3) as api,
        connected(api, receive_buffer=4096) as client,
    ):
        client.writer.write(UPGRADE + text_frame(json.dumps(ask).encode()))
        await api.observer.over.wait()
        assert api.observer.finished[0].error_code == "client_disconnected"
        assert api.generator.last.cancels == ["client disconnected"]


@on_both_loops
async def test_nobody_keeps_a_whole_answer_by_not_reading_it() -> None:
    tokenizer, _ = tokenizer_with_a_long_token()
    async with (
        served(floods(500), tokenizer, stall_timeout_s=0.1) as api,
        connected(api, receive_buffer=4096) as client,
    ):
        client.writer.write(post("/v1/completions", FLOOD | {"stream": False}))
        await api.observer.over.wait()
        head = await client.reader.readuntil(b"\r\n\r\n")
        size = int(head.partition(b"Content-Length: ")[2].split()[0])
        await asyncio.sleep(0.4)  # a reader that does nothing
        assert len(await client.read_until_broken()) < size


@on_both_loops
async def test_a_slow_reader_gets_everything_in_the_end() -> None:
    tokenizer, _ = tokenizer_with_a_long_token()
    async with (
        served(floods(500), tokenizer, stall_timeout_s=10.0) as api,
        connected(api, receive_buffer=65536) as client,
    ):
        client.writer.write(post("/v1/completions", FLOOD))
        await client.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3)
        assert not api.observer.over.is_set(), "the server waits for its reader"
        raw = await client.read_until(b"[DONE]")
        assert raw.count(b"x") > 500 * LONG_TOKEN_CHARS


@on_both_loops
async def test_silence_is_filled_with_comments() -> None:
    gate = asyncio.Event()
    script = says("Hello")

    def late(request: Any) -> list[Step]:
        return [Pause(until=gate), *script(request)]

    generator = FakeGenerator(late)
    async with served(generator, keep_alive_s=0.05) as api, api.chat(stream=True) as response:
        first = await response.content.readuntil(b": keep-alive\n\n: keep-alive\n\n")
        gate.set()
        rest = await response.read()
    events = events_of(first + rest)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[1] == ": keep-alive"
    texts = [e["choices"][0]["delta"].get("content", "") for e in events if isinstance(e, dict)]
    assert "".join(texts) == "Hello"


@on_both_loops
async def test_tokens_that_show_nothing_are_silence_too() -> None:
    steps = [Pause(0.02), Tokens([EOS])] * 20  # which is skipped
    generator = FakeGenerator(lambda _: [*steps, Tokens([EOS], FinishReason.STOP, EOS)])
    async with served(generator, keep_alive_s=0.05) as api, api.complete(stream=True) as response:
        assert b": keep-alive\n\n: keep-alive\n\n" in await response.read()


@on_both_loops
async def test_pipelined_requests_are_answered_in_turn() -> None:
    async with served() as api, connected(api) as client:
        client.writer.write(chat_request() + chat_request(stream=True))
        raw = await client.reader.readuntil(b"data: [DONE]")
        assert raw.count(b"HTTP/1.1 200") == 2
