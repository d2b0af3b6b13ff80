"""The deprecated `functions` and `function_call`, as the official SDK still has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.generator import MODEL, FakeGenerator, says, tool_tokenizer
from tests.unit.coordinator.api.answer.test_tools import CALL, MESSAGES, TOOLS
from tests.unit.coordinator.api.harness import client_of, is_error_body, prompt_of, served

FUNCTIONS: Any = [TOOLS[0]["function"]]
CALLED: Any = {"name": "weather", "arguments": '{"city": "Paris"}'}


async def test_a_function_is_called_as_of_old() -> None:
    generator = FakeGenerator(script=says(f"I look.\n{CALL}{CALL}"))
    async with served(generator, tool_tokenizer()) as api, client_of(api) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, functions=FUNCTIONS, function_call="auto"
        )
        assert '"name": "weather"' in prompt_of(api)
    (choice,) = answer.choices
    assert choice.finish_reason == "function_call"
    assert choice.message.content == "I look."
    assert choice.message.tool_calls is None
    called = choice.message.function_call
    assert called is not None
    assert (called.name, json.loads(called.arguments)) == ("weather", {"city": "Paris"})


@pytest.mark.parametrize("per_event", [1, 1000])
async def test_its_call_is_streamed(per_event: int) -> None:
    generator = FakeGenerator(script=says(CALL, per_event=per_event))
    async with served(generator, tool_tokenizer()) as api, client_of(api) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, functions=FUNCTIONS, stream=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
    pieces = [c.delta.function_call for c in choices if c.delta.function_call]
    assert [piece.name for piece in pieces if piece.name] == ["weather"]
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == {"city": "Paris"}
    assert all(choice.delta.tool_calls is None for choice in choices)
    assert choices[-1].finish_reason == "function_call"


async def test_a_named_function_must_be_called_and_none_may_not() -> None:
    async with served(FakeGenerator(says(CALL)), tool_tokenizer()) as api:
        twice = FUNCTIONS * 2  # the same one
        async with api.chat(functions=twice, function_call={"name": "weather"}) as response:
            assert response.status == 200
        assert "weather" in api.generator.last.request.sampling.grammar
        async with api.chat(functions=FUNCTIONS, function_call="none") as response:
            choice = (await response.json())["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == CALL


async def test_no_two_may_have_one_name_in_any_protocol() -> None:
    said, schema = [{"role": "user", "content": "Hi"}], {"type": "object"}
    named = [{"name": "a"}, {"name": "b"}, {"name": "a", "description": "Another."}]
    tools = [{"type": "function", "function": one} for one in named]
    flat = [{"type": "function", "parameters": schema} | one for one in named]
    choice = {"mode": "auto", "tools": tools[1:2]}
    allowed = {"type": "allowed_tools", "allowed_tools": choice}
    async with served(None, tool_tokenizer()) as api:
        for path, body, param in (
            ("chat/completions", {"messages": said, "tools": tools}, "tools[2].function.name"),
            (
                "chat/completions",
                {"messages": said, "tools": tools, "tool_choice": allowed},
                "tools[2].function.name",
            ),
            (
                "chat/completions",
                {"messages": said, "functions": named},
                "functions[2].name",
            ),
            ("responses", {"input": "Hi", "tools": flat}, "tools[2].name"),
            (
                "messages",
                {
                    "messages": said,
                    "max_tokens": 9,
                    "tools": [{"input_schema": schema} | one for one in named],
                },
                "tools[2].name",
            ),
        ):
            async with api.client.post(f"/v1/{path}", json={"model": MODEL, **body}) as response:
                error = (await response.json())["error"]
            assert response.status == 400
            assert f"{param!r} is 'a', which another tool has already" in error["message"]
        assert api.generator.generations == []


async def test_what_it_came_to_goes_back_into_the_prompt() -> None:
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": CALLED},
        {"role": "function", "name": "weather", "content": "Sunny."},
    ]
    source = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}{{ m.tool_call_id }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function }}{% endfor %}|{% endfor %}"
    )
    async with served(None, tool_tokenizer(source)) as api, api.chat(messages=messages) as response:
        assert response.status == 200
        assert prompt_of(api).endswith(
            "assistant call00001 {'name': 'weather', 'arguments': {'city': 'Paris'}}|"
            "tool Sunny.call00001|"
        )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions"),
        ({"functions": FUNCTIONS, "tool_choice": "auto"}, "functions"),
        ({"function_call": {"name": "weather"}, "tools": TOOLS}, "function_call"),
        ({"function_call": {"name": "weather"}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {"name": "other"}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
        ({"functions": [{}]}, "functions[0].name"),
        (
            {"messages": [{"role": "user", "content": "x", "function_call": CALLED}]},
            "messages[0].function_call",
        ),
    ],
)
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    async with served(None, tool_tokenizer()) as api, api.chat(**body) as response:
        answer = await response.json()
    assert response.status == 400
    assert is_error_body(answer)
    assert answer["error"]["param"] == param
