"""What a request leaves behind is freed with its last reference, not by the garbage collector."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import aiohttp
import pytest

from pdserve.protocol import FinishReason
from tests.fakes.generator import EOS, MODEL, FakeGenerator, Pause, Tokens
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import Harness, served
from tests.unit.coordinator.api.raw_client import chat_request, connected

MESSAGES = [{"role": "user", "content": "Hi"}]
NUM_REQUESTS = 20
CALLS = {
    "a streamed chat": ("/chat/completions", {"messages": MESSAGES, "stream": True}),
    "several answers": ("/chat/completions", {"messages": MESSAGES, "stream": True, "n": 3}),
    "a whole chat": ("/chat/completions", {"messages": MESSAGES}),
    "a stop string": ("/chat/completions", {"messages": MESSAGES, "stream": True, "stop": "wor"}),
    "a streamed completion": ("/completions", {"prompt": "Hi", "stream": True}),
    "a streamed response": ("/responses", {"input": "Hi", "stream": True, "store": False}),
    "an embedding": ("/embeddings", {"input": "Hi"}),
    "a refusal": ("/chat/completions", {"messages": MESSAGES, "temperature": "hot"}),
}


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize(("path", "body"), matrix(CALLS.values(), 3), ids=CALLS)
async def test_a_call_leaves_no_cycle_behind(path: str, body: dict[str, Any]) -> None:
    async with served() as api, aiohttp.ClientSession() as client:
        await _call(client, api, path, body)  # what is made once
        gc.collect()
        for _ in range(NUM_REQUESTS):
            await _call(client, api, path, body)
        assert gc.collect() < NUM_REQUESTS


async def test_nobody_holds_what_was_asked_while_it_is_answered() -> None:
    gate = asyncio.Event()
    steps = [Tokens([20]), Pause(until=gate), Tokens([EOS], FinishReason.STOP, EOS)]
    async with served(FakeGenerator(lambda request: steps)) as api, connected(api) as client:
        client.writer.write(chat_request(stream=True))
        await client.read_until(b'"content":"')
        gc.collect()
        dicts = [one for one in gc.get_objects() if type(one) is dict]
        assert [one for one in dicts if "messages" in one and one.get("stream") is True] == []
        gate.set()
        await client.read_until(b"[DONE]")


async def _call(
    client: aiohttp.ClientSession, api: Harness, path: str, body: dict[str, Any]
) -> None:
    async with client.post(f"{api.base_url}{path}", json={"model": MODEL, **body}) as response:
        await response.read()
    api.generator.generations.clear()  # which it remembers
