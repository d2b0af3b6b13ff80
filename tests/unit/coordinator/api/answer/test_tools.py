"""Tools and reasoning in chat answers, as the official SDK sees them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from pdserve.protocol import FinishReason
from tests.fakes.generator import (
    MODEL,
    FakeGenerator,
    Pause,
    Tokens,
    says,
    tiny_tokenizer,
    tool_tokenizer,
)
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import client_of, events_of, prompt_of, served

MESSAGES: Any = [{"role": "user", "content": "Weather in Paris?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    }
]
DEADLINE_S = 30.0
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("said", "shown"),
    matrix(
        [
            ("<tool_", None),
            ('<tool_call>\n{"name": "wea', None),
            ('<tool_call>\n{"name": "weather", "arguments": {"city": "Pa', '{"city": "Pa'),
            (CALL, '{"city": "Paris"}'),
            (CALL + "\n<tool_call>", '{"city": "Paris"}'),
        ],
        2,
    ),
)
async def test_a_call_that_must_be_shows_no_mark_when_it_is_cut_off(
    said: str, shown: str | None
) -> None:
    ids = tiny_tokenizer().encode(said, add_special_tokens=False)
    generator = FakeGenerator(lambda _: [Tokens(ids, FinishReason.LENGTH)])
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    async with served(generator, tool_tokenizer()) as api, client_of(api) as client:
        (whole,) = (await client.chat.completions.create(**asked)).choices
        stream = await client.chat.completions.create(**asked, stream=True)
        deltas = [chunk.choices[0] async for chunk in stream]
    calls = whole.message.tool_calls or []
    assert [call.function.arguments for call in calls] == ([] if shown is None else [shown])
    assert (whole.finish_reason, whole.message.content or "") == ("length", "")
    assert (deltas[-1].finish_reason, "".join(d.delta.content or "" for d in deltas)) == (
        "length",
        "",
    )
    pieces = [piece.function for d in deltas for piece in d.delta.tool_calls or []]
    assert "".join(piece.arguments or "" for piece in pieces if piece) == (shown or "")


async def test_a_call_comes_whole() -> None:
    generator = FakeGenerator(script=says(f"I look.\n{CALL}"))
    async with served(generator, tool_tokenizer()) as api, client_of(api) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
        assert '"name": "weather"' in prompt_of(api)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Paris"},
    )


@pytest.mark.parametrize("per_event", [1, 7, 1000])
async def test_calls_are_streamed(per_event: int) -> None:
    said = f"<think>Hm.</think>{CALL}{CALL}"
    generator = FakeGenerator(script=says(said, per_event=per_event))
    async with (
        served(generator, tool_tokenizer(), splits_reasoning=True) as api,
        client_of(api) as client,
        client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream,
    ):
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        whole = await stream.get_final_completion()
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert not message.content
    assert [json.loads(c.function.arguments) for c in message.tool_calls or []] == 2 * [
        {"city": "Paris"}
    ]
    told = [c.choices[0].delta.tool_calls or [] for c in chunks if c.choices]
    pieces = [piece for one in told for piece in one]
    assert all(len({piece.index for piece in one}) == len(one) for one in told)
    assert {piece.index for piece in pieces} == {0, 1}
    assert len({piece.id for piece in pieces if piece.id}) == 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_arguments_come_as_they_are_written() -> None:
    """The rest of the call is not written before the client has a piece of its arguments."""
    ids = tiny_tokenizer().encode(CALL, add_special_tokens=False)
    half, has_a_piece = CALL.index("Paris"), asyncio.Event()
    begun = tiny_tokenizer().encode(CALL[:half], add_special_tokens=False)
    assert ids[: len(begun)] == begun
    rest = Tokens(ids[len(begun) :], FinishReason.LENGTH)
    generator = FakeGenerator(lambda _: [Tokens(begun), Pause(until=has_a_piece), rest])
    arguments = ""
    async with served(generator, tool_tokenizer()) as api, client_of(api) as client:
        asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
        async with asyncio.timeout(DEADLINE_S):
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                for piece in chunk.choices[0].delta.tool_calls or []:
                    if piece.function and piece.function.arguments:
                        arguments += piece.function.arguments
                        has_a_piece.set()
    assert json.loads(arguments) == {"city": "Paris"}


async def test_one_call_at_a_time_if_that_is_wanted() -> None:
    generator = FakeGenerator(script=says(CALL + CALL))
    async with served(generator, tool_tokenizer()) as api, client_of(api) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False
        )
    assert len(answer.choices[0].message.tool_calls or []) == 1


async def test_without_tools_calls_are_text() -> None:
    generator = FakeGenerator(script=says(CALL))
    async with served(generator, tool_tokenizer()) as api, client_of(api) as client:
        for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **extra)
            assert answer.choices[0].message.content == CALL
            assert answer.choices[0].finish_reason == "stop"
            assert "weather" not in prompt_of(api).lower().replace("weather in", "")


async def test_answers_of_tools_go_back_into_the_prompt() -> None:
    call = {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call | {"type": "function"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
    ]
    async with served(None, tool_tokenizer()) as api, client_of(api) as client:
        await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        assert "<|assistant|>weather(Paris)<|tool|>Sunny." in prompt_of(api)


async def test_reasoning_is_apart_if_the_operator_wants_it() -> None:
    generator = FakeGenerator(script=says("Hm, Paris.\n</think>\n\nSunny."))
    async with (
        served(generator, tool_tokenizer(), splits_reasoning=True) as api,
        client_of(api) as client,
    ):
        ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
        ask["extra_body"] = {"chat_template_kwargs": {"thinks": True}}
        answer = await client.chat.completions.create(**ask)
        message = answer.choices[0].message
        assert message.content == "Sunny."
        assert message.model_extra is not None
        assert message.model_extra["reasoning_content"] == "Hm, Paris.\n"
        with_usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(**ask, **with_usage)
        *chunks, last = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        ask["extra_body"] |= {"stream_reasoning": False}
        stream = await client.chat.completions.create(**ask, stream=True)
        whole = [chunk.choices[0].delta async for chunk in stream]
    thought = tiny_tokenizer().encode("Hm, Paris.\n</think>", add_special_tokens=False)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought)
    assert last.usage == answer.usage
    for shown in (deltas, whole):
        assert "".join(delta.content or "" for delta in shown) == "Sunny."
        reasoning = [delta.model_extra["reasoning_content"] or "" for delta in shown]
        assert "".join(reasoning) == "Hm, Paris.\n", "the field is there, if only as null"
    assert reasoning.count("Hm, Paris.\n") == 1, "in one piece"


@pytest.mark.parametrize(
    ("asked", "content"),
    [
        ({"include_reasoning": False}, "Sunny."),
        ({"separate_reasoning": False}, "Hm, Paris.\n</think>\n\nSunny."),
    ],
)
async def test_reasoning_is_left_out_or_in_if_the_client_wants_it(
    asked: dict[str, Any], content: str
) -> None:
    generator = FakeGenerator(script=says("Hm, Paris.\n</think>\n\nSunny."))
    body: dict[str, Any] = {"chat_template_kwargs": {"thinks": True}, **asked}
    async with served(generator, tool_tokenizer(), splits_reasoning=True) as api:
        async with api.chat(**body) as response:
            message = (await response.json())["choices"][0]["message"]
        async with api.chat(**body, stream=True) as response:
            events = events_of(await response.read())[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert message["content"] == content
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert not any("reasoning_content" in shown for shown in [message, *deltas])


async def test_a_model_whose_calls_are_not_understood_takes_no_tools() -> None:
    for template, said in (
        ("{{ messages }}", "does not support tools"),
        ("{{ tools }}", "--set answers.tool_format=FORMAT"),
    ):
        async with (
            served(None, tool_tokenizer(template)) as api,
            api.chat(tools=TOOLS) as response,
        ):
            assert response.status == 400
            assert said in (await response.json())["error"]["message"]


async def test_only_allowed_tools_are_there() -> None:
    tools: Any = [{"type": "function", "function": {"name": name}} for name in ("rain", "sun")]
    choice: Any = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "sun"}}],
        },
    }
    async with served(None, tool_tokenizer()) as api, client_of(api) as client:
        await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=tools, tool_choice=choice
        )
        grammar = api.generator.last.request.sampling.grammar
        assert ("sun" in grammar, "rain" in grammar) == (True, False)
        assert "rain" not in prompt_of(api)
        allowed: Any = {"type": "allowed_tools", "mode": "auto"}
        await client.responses.create(
            model=MODEL,
            input="Hi",
            tools=[{"type": "function", **tool["function"]} for tool in tools],
            tool_choice=allowed | {"tools": [{"type": "function", "name": "sun"}]},
        )
        assert not api.generator.last.request.sampling.grammar
        assert "rain" not in prompt_of(api)
        choice["allowed_tools"]["tools"][0]["function"]["name"] = "snow"
        with pytest.raises(openai.BadRequestError, match="'snow', which is not one of 'tools'"):
            await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, tools=tools, tool_choice=choice
            )


ONE_CALL = [("weather", '{"city": "Paris"}')]
ENDS: list[tuple[str, dict[str, Any], str, str, list[tuple[str, str]], str]] = [
    # said, asked, reasoning, content, calls, finish reason
    (f"<think>Hm.\n{CALL}", {}, "Hm.\n", "", ONE_CALL, "tool_calls"),
    (f"<think>Hm.\n{CALL} Sure?</think>Yes.", {}, f"Hm.\n{CALL} Sure?", "Yes.", [], "stop"),
    ("<think>Is it <tool_call>?", {}, "Is it <tool_call>?", "", [], "stop"),
    ("<think>a</think>\n<think>b</think>c", {}, "ab", "c", [], "stop"),
    ("<think>A Question: b</think>\nYes.", {"stop": "Question:"}, "A Question: b", "Yes.", [],
     "stop"),
    ("<think>a</think>\n\nYes.\n\nNo", {"stop": "\n\n"}, "a", "Yes.", [], "stop"),
    ("<think>a</think>Yes Question: No", {"stop": "Question:"}, "a", "Yes ", [], "stop"),
    ("Yes Question: No", {"stop": "Question:"}, "", "Yes ", [], "stop"),
    (CALL, {"stop": "Par"}, "", "", [("weather", '{"city": "')], "stop"),
    (CALL, {"stop": '"name"'}, "", "<tool_call>\n{", [], "stop"),
    (CALL, {"stop": "</tool_call>"}, "", "", ONE_CALL, "tool_calls"),
    (CALL + CALL, {"stop": "call>\n<tool"}, "", "", 2 * ONE_CALL, "tool_calls"),
    (CALL + CALL[:-18], {}, "", "", [*ONE_CALL, ("weather", '{"city": "Par')], "stop"),
    ('<tool_call>{"name": "Alice", "arguments": {}}</tool_call>', {}, "",
     '<tool_call>{"name": "Alice", "arguments": {}}</tool_call>', [], "stop"),
]  # fmt: skip


@pytest.mark.parametrize("per_event", matrix([1, 1000], 1))
async def test_how_answers_end(per_event: int) -> None:
    """Whole, streamed, and as a response: the same parts."""
    async with served(None, tool_tokenizer(), splits_reasoning=True) as api:
        for said, asked, *expected in ENDS:
            api.generator.script = says(said, per_event=per_event)
            async with api.chat(tools=TOOLS, **asked) as response:
                choice = (await response.json())["choices"][0]
            assert _parts_of([choice["message"]], choice) == expected, said
            async with api.chat(tools=TOOLS, stream=True, **asked) as response:
                choices = [e["choices"][0] for e in events_of(await response.read())[:-1]]
            assert _parts_of([c["delta"] for c in choices], choices[-1]) == expected, said
            tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
            body = {"model": MODEL, "input": "Hi", "tools": tools, **asked}
            async with api.client.post("/v1/responses", json=body) as response:
                items = (await response.json())["output"]
            calls = [i for i in items if i["type"] == "function_call"]
            assert [(i["name"], i["arguments"]) for i in calls] == expected[2], said
            if calls:
                is_whole = expected[3] == "tool_calls"
                assert calls[-1]["status"] == ("completed" if is_whole else "incomplete")


def _parts_of(messages: list[dict[str, Any]], choice: dict[str, Any]) -> list[Any]:
    calls: list[list[str]] = []
    for message in messages:
        for call in message.get("tool_calls") or []:
            if "id" in call:
                calls.append(["", ""])
            calls[-1][0] += call["function"].get("name", "")
            calls[-1][1] += call["function"]["arguments"]
    reasoning = "".join(message.get("reasoning_content") or "" for message in messages)
    content = "".join(message.get("content") or "" for message in messages)
    return [reasoning, content, [(name, text) for name, text in calls], choice["finish_reason"]]
