"""Calls that clients send back: whatever was given out is taken, and templates still render."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.api.read.arguments import read_arguments
from coordinator.api.read.json_text import JsonReader
from coordinator.text.parts import ToolFormat
from tests.fakes.generator import MODEL, tool_tokenizer
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import prompt_of, served

GIVEN = {"city": 'Par\\is "q" é \n', "n": -1.5e3, "deep": {"a": [1, {"b": None}], "c": True}}
ODD = [
    "",
    " ",
    "hello",
    "[1]",
    '"x"',
    "5",
    "}",
    "{{",
    "{'a': 1}",
    '{"a": 1} x',
    '{"a": ' + "[" * 300,
]
DEEP = '{"a":' + "[" * 130 + "]" * 130 + "}"  # more than is read
# It takes the arguments as a mapping, calls by name, and ids of nine letters and digits.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
    "{{ raise_exception('no id') }}{% endif %}[TOOL_CALLS]{{ call.function.name }}"
    "{% for key, value in call.function.arguments | items %} {{ key }}={{ value | tojson }}"
    "{% endfor %}{{ call.id }}{% endfor %}{{ m.tool_call_id }}\n{% endfor %}"
)


def test_what_was_cut_off_is_read_as_far_as_it_goes() -> None:
    text = json.dumps(GIVEN)
    found: dict[str, Any] = {}
    for length in range(len(text) + 1):
        found = read_arguments(text[:length], JsonReader())
        assert list(found) == list(GIVEN)[: len(found)]
    assert found == GIVEN


def test_what_was_cut_off_is_read_in_one_pass() -> None:
    """It holds the event loop; read anew from each quote or bracket, this would take minutes."""
    said = 100_000 * '\\"'
    assert read_arguments(f'{{"a": "{said}', JsonReader()) == {"a": 100_000 * '"'}
    nested = '{"a": ' + 100_000 * "["
    assert read_arguments(nested, JsonReader()) == {"arguments": nested}


@pytest.mark.parametrize("text", ODD)
def test_what_is_no_object_is_shown_as_it_is(text: str) -> None:
    found = read_arguments(text, JsonReader())
    assert found == ({"arguments": text} if text.strip() else {})


@pytest.mark.parametrize("arguments", matrix(['{"city":', '{"city": "Pa', DEEP, *ODD], 3))
async def test_every_protocol_takes_it_back(arguments: str) -> None:
    call = {"name": "alpha.beta", "arguments": arguments}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "Dry."},
    ]
    old = [messages[0], {"role": "assistant", "content": None, "function_call": call}]
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "call_0", **call},
        {"type": "function_call_output", "call_id": "call_0", "output": "Dry."},
    ]
    tokenizer = tool_tokenizer(TEMPLATE)
    async with served(None, tokenizer, tool_format=ToolFormat.MISTRAL) as api:

        async def posted(path: str, **body: Any) -> Any:
            async with api.client.post(path, json={"model": MODEL} | body) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        await posted("/v1/chat/completions", messages=messages)
        shown = prompt_of(api)
        assert shown.count("[TOOL_CALLS]alpha.beta") == 1
        assert shown.count("call_0") == 0, "the template takes no such id"
        await posted("/v1/chat/completions", messages=old)
        await posted("/tokenize", messages=messages)
        await posted("/v1/responses", input=items)
        assert prompt_of(api) == shown
        body = {"items": items}
        async with api.client.post("/v1/conversations", json=body) as response:
            assert response.status == 200, await response.text()
            conversation = (await response.json())["id"]
        await posted("/v1/responses", input="So?", conversation=conversation)
        assert prompt_of(api).startswith(shown)
