"""POST /v1/chat/completions, as the official SDK and as raw HTTP see it."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from typing import Any

import openai
import pytest

from coordinator.generation import GenerationRequest, Route
from pdserve.protocol import FinishReason
from tests.fakes.generator import (
    EOS,
    MODEL,
    FakeGenerator,
    Pause,
    Step,
    Tokens,
    says,
    tiny_tokenizer,
)
from tests.unit.coordinator.api.harness import events_of, served

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


async def test_whole_answer_with_the_async_sdk() -> None:
    async with served() as api, openai.AsyncOpenAI(base_url=api.base_url, api_key="-") as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=7)
        sent = api.generator.last.request
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id == sent.request_id
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.system_fingerprint is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(sent.prompt.token_ids)
    num_words = len(tiny_tokenizer().encode("Hello world", add_special_tokens=False))
    assert answer.usage.completion_tokens == num_words + 1  # EOS counts
    assert answer.usage.total_tokens == len(sent.prompt.token_ids) + num_words + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert sent.sampling.seed == 7
    assert sent.sampling.max_tokens == 512 - len(sent.prompt.token_ids)
    prompt = tiny_tokenizer().decode(sent.prompt.token_ids, skip_special_tokens=False)
    assert prompt == "<s><|user|>Hi</s>\n<|assistant|>"


async def test_stream_with_the_async_sdk() -> None:
    async with served() as api, openai.AsyncOpenAI(base_url=api.base_url, api_key="-") as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Hello world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_both_ways_with_the_sync_sdk() -> None:
    async with served() as api:

        def ask() -> tuple[str | None, str]:
            with openai.OpenAI(base_url=api.base_url, api_key="-") as client:
                answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
                with client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, stream=True
                ) as stream:
                    texts = [chunk.choices[0].delta.content or "" for chunk in stream]
                return answer.choices[0].message.content, "".join(texts)

        assert await asyncio.to_thread(ask) == ("Hello world", "Hello world")


async def test_the_bytes_of_a_stream() -> None:
    generator = FakeGenerator(says("Hello world", pause_s=0.01))
    async with served(generator) as api, api.chat(stream=True) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["x-pdserve-prefill-node"] == "prefill-0"
        assert response.headers["x-pdserve-decode-node"] == "decode-0"
        assert response.headers["x-request-id"].startswith("req-")
        raw = await response.read()
    events = events_of(raw)
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-2]["choices"][0]["delta"] == {}
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in events[0]
    assert events[0]["object"] == "chat.completion.chunk"
    assert b"\r" not in raw


@pytest.mark.parametrize("per_event", [1, 3, 100])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_the_answer_and_frees_the_nodes(
    per_event: int, stream: bool
) -> None:
    generator = FakeGenerator(says("one two STOP three four", per_event=per_event, pause_s=0.001))
    async with served(generator) as api, api.chat(stop=["STOP"], stream=stream) as response:
        if stream:
            events = events_of(await response.read())
            choices = [event["choices"][0] for event in events[:-1]]
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            finish = choices[-1]["finish_reason"]
            assert all(
                c["delta"].get("content") or c["finish_reason"] or "role" in c["delta"]
                for c in choices
            ), "no chunk is sent with nothing to show"
        else:
            body = await response.json()
            text = body["choices"][0]["message"]["content"]
            finish = body["choices"][0]["finish_reason"]
            up_to_stop = tiny_tokenizer().encode("one two STOP", add_special_tokens=False)
            assert body["usage"]["completion_tokens"] == len(up_to_stop)
    assert (text, finish) == ("one two ", "stop")
    assert generator.last.cancels == ["stop string"]


@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_an_answer_stopped_at_is_told(kind: str, stream: bool) -> None:
    (b,) = tiny_tokenizer().encode("b", add_special_tokens=False)
    at_token = FakeGenerator(lambda _: [Tokens([5, b], FinishReason.STOP, b)])
    asked: list[tuple[FakeGenerator, dict[str, Any], str | int | None]] = [
        (FakeGenerator(says("one STOP")), {"stop": ["x", "STOP"]}, "STOP"),
        (at_token, {"stop_token_ids": [b]}, b),
        (FakeGenerator(says("one")), {"stop": ["x"]}, None),
    ]
    for generator, body, reason in asked:
        async with (
            served(generator) as api,
            getattr(api, kind)(stream=stream, **body) as response,
        ):
            raw = await response.read()
        choices = [e["choices"][0] for e in events_of(raw)[:-1]] if stream else None
        choices = choices or json.loads(raw)["choices"]
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == reason
        assert all("stop_reason" not in choice for choice in choices[:-1])


async def test_stop_strings_wait_for_min_tokens() -> None:
    generator = FakeGenerator(says("a a a a"))
    async with served(generator) as api, api.chat(stop="a", min_tokens=3) as response:
        body = await response.json()
    ids = tiny_tokenizer().encode("a a a a", add_special_tokens=False)
    shown = tiny_tokenizer().decode(ids[:3])
    rest = tiny_tokenizer().decode(ids[3:])
    assert body["choices"][0]["message"]["content"] == shown + rest[: rest.index("a")]


async def test_length_is_the_other_reason() -> None:
    async with served() as api, api.chat(max_completion_tokens=2, max_tokens=5) as response:
        body = await response.json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2
    assert api.generator.last.cancels == []


async def test_characters_are_whole_in_every_chunk() -> None:
    """And are shown as soon as they are whole, while nothing else has come."""
    text, gate = "é 🦊🦊 你們 ok", asyncio.Event()
    tokenizer = tiny_tokenizer()
    num_first = len(tokenizer.encode("é 🦊", add_special_tokens=False))

    def script(request: GenerationRequest) -> list[Step]:
        steps = [step for step in says(text)(request) if isinstance(step, Tokens)]
        return [*steps[:num_first], Pause(until=gate), *steps[num_first:]]

    async with served(FakeGenerator(script)) as api, api.chat(stream=True) as response:
        first = b""
        while not content_of(first).endswith("🦊"):
            first += await response.content.readuntil(b"\n\n")
        gate.set()
        shown = content_of(first + await response.read())
    assert shown == text


def content_of(stream: bytes) -> str:
    """The text of a stream's chunks up to here, none of which is cut within a character."""
    chunks = [event for event in events_of(stream) if isinstance(event, dict)]
    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert not any("�" in text for text in texts)
    return "".join(texts)


async def test_logprobs() -> None:
    async with served(FakeGenerator(says("a🦊"))) as api:
        async with api.chat(logprobs=True, top_logprobs=2) as response:
            whole = (await response.json())["choices"][0]
        async with api.chat(logprobs=True, top_logprobs=2, stream=True) as response:
            events = events_of(await response.read())
    content = whole["logprobs"]["content"]
    assert bytes(b for token in content for b in token["bytes"]).decode() == "a🦊"
    assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)
    assert content[0]["token"] == "a"
    assert content[0]["logprob"] == -0.5
    assert content[0]["top_logprobs"][1]["logprob"] == -1.5
    assert content[1]["token"] == "�"
    streamed = [
        token
        for event in events[:-1]
        for token in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    assert events[-2]["choices"][0]["logprobs"] is None, "the end shows no token"


async def test_logprobs_without_alternatives() -> None:
    async with served() as api, api.chat(logprobs=True) as response:
        content = (await response.json())["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in content] == [[]] * len(content)
    assert "".join(token["token"] for token in content) == "Hello world"  # EOS is not shown


async def test_an_answer_may_be_empty() -> None:
    def script(request: object) -> list[Any]:
        return [Tokens([EOS], FinishReason.STOP, EOS)]

    async with served(FakeGenerator(script)) as api:
        async with api.chat() as response:
            body = await response.json()
        async with api.chat(stream=True) as response:
            events = events_of(await response.read())
    assert body["choices"][0]["message"]["content"] == ""
    assert body["usage"]["completion_tokens"] == 1
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, "stop"]


async def test_content_parts_and_roles() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]},
        {"role": "assistant", "content": "so", "refusal": None, "tool_calls": []},
    ]
    body = {"messages": messages, "continue_final_message": True}
    async with served() as api, api.chat(**body) as response:
        assert response.status == 200
    prompt = tiny_tokenizer().decode(
        api.generator.last.request.prompt.token_ids, skip_special_tokens=False
    )
    assert prompt == "<s><|system|>Be brief.</s>\n<|user|>one\ntwo</s>\n<|assistant|>so"


@pytest.mark.parametrize(
    ("asked", "content"),
    [
        ({"echo": True, "continue_final_message": True}, "So, Hello world"),
        ({"echo": False, "continue_final_message": True}, "Hello world"),
        ({"echo": True}, "Hello world"),  # the answer is a message of its own
    ],
)
async def test_an_answer_is_shown_with_what_it_continues(
    asked: dict[str, Any], content: str
) -> None:
    body = {"messages": [*MESSAGES, {"role": "assistant", "content": "So, "}], **asked}
    async with served() as api:
        async with api.chat(**body, n=2) as response:
            choices = (await response.json())["choices"]
        async with api.chat(**body, stream=True) as response:
            events = events_of(await response.read())[:-1]
    assert [choice["message"]["content"] for choice in choices] == [content] * 2
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == content


async def test_events_that_wait_together_go_out_together() -> None:
    gate = asyncio.Event()
    ids = tiny_tokenizer().encode("one two three four", add_special_tokens=False)

    def script(request: object) -> list[Any]:
        rest: list[Any] = [Tokens([i]) for i in ids[1:]]
        return [Tokens(ids[:1]), Pause(until=gate), *rest, Tokens([EOS], FinishReason.STOP, EOS)]

    async with served(FakeGenerator(script)) as api, api.chat(stream=True) as response:
        await response.content.readuntil(b'"content":"o')
        gate.set()
        rest = await response.read()
    assert rest.count(b'"content":') == 1


async def test_many_at_once() -> None:
    text = "The quick brown fox. " * 4
    async with served(FakeGenerator(says(text, pause_s=0.001))) as api:

        async def ask() -> str:
            async with api.chat(stream=True) as response:
                events = events_of(await response.read())
            return "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])

        assert await asyncio.gather(*(ask() for _ in range(50))) == [text] * 50
    assert len({g.request.request_id for g in api.generator.generations}) == 50
    assert len({g.request.sampling.seed for g in api.generator.generations}) == 50


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_tokens_can_be_counted_along(kind: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with (
        served(FakeGenerator(says("Hello world", pause_s=0.001))) as api,
        getattr(api, kind)(stream=True, stream_options=options) as response,
    ):
        events = events_of(await response.read())[:-1]
    usages = [event["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in usages]
    assert (counts[0] == 0) == (kind == "chat"), "a chat's first chunk has the role alone"
    assert len(counts) >= 3
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert usages[-1] == events[-1]["usage"]
    assert events[-1]["choices"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_the_fingerprint_names_the_revision(stream: bool) -> None:
    """In every chunk, and of two revisions it differs also where their beginnings are the same."""
    told: dict[str, set[str]] = {}
    for revision in ("4f0c12345-a", "4f0c12345-b"):
        async with served() as api:
            api.generator.route = Route("prefill-0", "decode-0", revision)
            for ask in (api.chat, partial(api.complete, prompt="Hi")):
                async with ask(stream=stream) as response:
                    raw = await response.read()
                found = set(re.findall(rb'"system_fingerprint":"([^"]*)"', raw))
                told.setdefault(revision, set()).update(name.decode() for name in found)
    assert [len(names) for names in told.values()] == [1, 1]
    assert all(name.startswith("fp_4f0c1234_") for names in told.values() for name in names)
    assert len(set.union(*told.values())) == 2


async def test_what_a_gateway_in_front_makes_of_a_chat_is_answered() -> None:
    """As sglang-router 0.3.2 forwards one: see findings/sglang-router-rewrites-chats.sh."""
    forwarded = {
        "logit_bias": {"5": -1.0},
        "logprobs": False,
        "max_completion_tokens": 7,
        "seed": 5,
        "stream": False,
        "no_stop_trim": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
    }
    async with served() as api:
        async with api.chat(**forwarded) as answer:
            assert answer.status == 200, await answer.text()
        assert api.generator.last.request.sampling.max_tokens == 7
