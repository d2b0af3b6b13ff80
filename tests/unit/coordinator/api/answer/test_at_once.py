"""What streams send without waking their tasks: the same bytes, and only what nothing waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import pytest

from coordinator.api.answer.arrivals import Arrivals, ArrivedEvent, WriteTurns
from coordinator.api.answer.sse import SseStream
from coordinator.generation import GenerationRequest, Listener
from pdserve._native import TokenRun
from pdserve.protocol import FinishReason, Prompt, SamplingParams
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import NodeLost
from tests.fakes.generator import (
    MODEL,
    FakeGeneration,
    FakeGenerator,
    Pause,
    Step,
    Tokens,
    says,
    tiny_tokenizer,
)
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import Harness, events_of, served

TEXT = "one two three four five six seven eight nine ten eleven twelve"


def arrivals_of(*steps: Step) -> Arrivals:
    request = GenerationRequest(
        request_id="r", prompt=Prompt([1]), sampling=SamplingParams(max_tokens=99)
    )
    clock = ManualClock()
    return Arrivals([FakeGeneration(request, list(steps))], clock, WriteTurns(clock))


async def test_the_reader_sleeps_while_events_are_taken_at_once() -> None:
    gate = asyncio.Event()
    middle = [step for i in range(5) for step in (Pause(), Tokens([10 + i]))]
    last = Tokens([99], FinishReason.STOP)
    arrivals = arrivals_of(Tokens([1]), Pause(until=gate), *middle, Pause(0.01), last)
    assert [a.event.token_ids for a in await arrivals.take()] == [[1]]
    seen: list[int] = []

    def take(ready: list[ArrivedEvent]) -> bool:
        seen.extend(token_id for a in ready for token_id in a.event.token_ids)
        ready.clear()
        return True

    arrivals.at_once = take
    gate.set()
    assert [a.event.token_ids for a in await arrivals.take(10.0)] == [[99]]
    assert seen == [10, 11, 12, 13, 14]
    arrivals.close()


async def test_what_is_left_and_what_goes_wrong_is_the_readers() -> None:
    gate = asyncio.Event()
    arrivals = arrivals_of(
        Tokens([1]), Pause(until=gate), Tokens([2]), Pause(until=asyncio.Event())
    )
    await arrivals.take()
    arrivals.at_once = lambda ready: False
    gate.set()
    assert [a.event.token_ids for a in await arrivals.take(10.0)] == [[2]]
    arrivals.close()

    def fails(ready: list[ArrivedEvent]) -> bool:
        ready.clear()
        raise KeyError("an event that cannot be made")

    gate = asyncio.Event()
    arrivals = arrivals_of(Tokens([1]), Pause(until=gate), Tokens([2]))
    await arrivals.take()
    arrivals.at_once = fails
    gate.set()
    with pytest.raises(KeyError, match="cannot be made"):
        await arrivals.take(10.0)
    arrivals.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": True, "top_logprobs": 20},  # too long to be sent at once
        {"stop": ["nine t"]},
        {"n": 3},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"min_tokens": 3, "stop": ["two"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("version", matrix(["1.0", "1.1"], {"1.1"}))
async def test_a_stream_says_what_the_whole_answer_says(
    options: dict[str, Any], version: str
) -> None:
    script = says(TEXT, pause_s=0.0005)
    async with served(FakeGenerator(script)) as api:
        whole = [c["message"]["content"] for c in (await _whole(api, options))["choices"]]
        events = await _streamed(api, options, version)
    chunks = [event for event in events if isinstance(event, dict)]
    assert events[-1] == "data: [DONE]"
    for index, content in enumerate(whole):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content") or "" for c in choices) == content
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    assert len(chunks) > 3


async def test_an_error_in_the_moment_of_a_long_event_comes_after_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listeners: list[Listener] = []
    listen, send_at_once = FakeGeneration.listen, SseStream.send_at_once

    def listened(
        self: FakeGeneration, listener: Listener, on_tokens: Callable[[TokenRun], None] | None
    ) -> None:
        listeners.append(listener)
        listen(self, listener, on_tokens)

    def sent_at_once(self: SseStream, events: Sequence[bytes]) -> bool:
        is_short = send_at_once(self, events)
        if not is_short:
            listeners[0](NodeLost("it is gone"))
        return is_short

    monkeypatch.setattr(FakeGeneration, "listen", listened)
    monkeypatch.setattr(SseStream, "send_at_once", sent_at_once)
    one, *more = tiny_tokenizer().encode("one two three four", add_special_tokens=False)
    script = [Tokens([one]), Pause(), Tokens(more), Pause(until=asyncio.Event())]
    async with served(FakeGenerator(lambda request: script)) as api:
        events = await _streamed(api, {"logprobs": True, "top_logprobs": 20}, "1.1")
    chunks = [event for event in events if isinstance(event, dict)]
    text = "".join(c["delta"].get("content") or "" for e in chunks[:-1] for c in e["choices"])
    assert text == tiny_tokenizer().decode([one, *more])
    assert chunks[-1]["error"]["message"] == "it is gone"


async def _whole(api: Harness, options: dict[str, Any]) -> Any:
    plain = {k: v for k, v in options.items() if k != "stream_options"}
    async with api.chat(**plain) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def _streamed(api: Harness, options: dict[str, Any], version: str) -> list[Any]:
    async with aiohttp.ClientSession(
        api.server.url, version=aiohttp.HttpVersion(1, int(version[-1]))
    ) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with client.post("/v1/chat/completions", json=body | options) as response:
            assert response.status == 200, await response.text()
            return events_of(await response.read())
