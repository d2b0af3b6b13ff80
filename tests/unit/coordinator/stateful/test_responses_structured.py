"""Structured output and enforced calls through the Responses API: as chat has them."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from tests.fakes.generator import MODEL, FakeGenerator, says, tool_tokenizer
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import client_of, is_error_body, served
from tests.unit.coordinator.api.plan.test_structured import POINT, sent, takes
from tests.unit.coordinator.stateful.test_responses import post

SCHEMA: dict[str, Any] = {"type": "json_schema", "name": "point", "schema": POINT, "strict": True}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "locate", "parameters": POINT},
    {"type": "function", "name": "forget", "parameters": POINT},
]


def call_of(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"x": 1}}}}\n</tool_call>'


class Point(pydantic.BaseModel):
    x: int


async def test_the_sdk_parses_what_it_asked_for() -> None:
    async with served(FakeGenerator(says('{"x": 7}'))) as api, client_of(api) as client:
        answer = await client.responses.parse(model=MODEL, input="Where?", text_format=Point)
        assert answer.output_parsed == Point(x=7)
        assert takes(sent(api), '{"x": 7}')
        assert not takes(sent(api), '{"x": "7"}')
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    matrix(
        [
            ({"text": {"format": {"type": "text"}}}, None, None),
            ({"text": {}}, None, None),
            ({"text": {"format": {"type": "json_object"}}}, '{"a": 1}', "[]"),
            (
                {"text": {"format": {"type": "json_object", "schema": SCHEMA["schema"]}}},
                '{"x": 1}',
                "{}",
            ),
            ({"text": {"format": SCHEMA}}, '{"x": 1}', "{}"),
            ({"structured_outputs": {"regex": "a|b"}}, "a", "ab"),
            ({"tools": TOOLS}, None, None),
            ({"tools": TOOLS, "tool_choice": "required"}, call_of("forget"), "No."),
            (
                {"tools": TOOLS, "tool_choice": {"type": "function", "name": "locate"}},
                call_of("locate"),
                call_of("forget"),
            ),
        ],
        4,
    ),
)
async def test_nodes_are_told_what_to_enforce(
    body: dict[str, Any], good: str | None, bad: str | None
) -> None:
    tokenizer = tool_tokenizer()
    async with served(None, tokenizer) as api, post(api, **body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        if good is None or bad is None:
            assert sent(api) == ""
        else:
            assert takes(sent(api), good, tokenizer)
            assert not takes(sent(api), bad, tokenizer)
    assert answer["tool_choice"] == body.get("tool_choice", "auto")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "format.name"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "format.name"),
        ({"text": {"format": SCHEMA | {"schema": {"not": {}}}}}, "format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "format.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with served(None, tool_tokenizer()) as api, post(api, **body) as response:
        answer = await response.json()
        assert response.status == 400, answer
    assert is_error_body(answer)
    assert answer["error"]["param"].endswith(param)
    assert answer["error"]["param"].split(".")[0] in body
    assert api.generator.generations == []
