"""Answers conform: random schemas and seeds, at temperature 1, by the demo model."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.text.grammars import (
    AnswerGrammar,
    CallGrammar,
    OfferedTool,
    Output,
    OutputKind,
)
from coordinator.text.parts import ToolFormat
from tests.matrix import examples, matrix
from tests.unit.engine_grammar.answers import DemoModel
from tests.unit.engine_grammar.schemas import schemas

NUM_SCHEMAS, NUM_SEEDS = 8, 3  # of one batch

_ids = itertools.count()


def grammar_of(schema: Any) -> str:
    return AnswerGrammar(Output(OutputKind.JSON, schema, "schema")).text()


@settings(
    max_examples=examples(10),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    wanted=st.lists(schemas(), min_size=NUM_SCHEMAS, max_size=NUM_SCHEMAS),
    seed=st.integers(0, 2**32),
)
def test_answers_are_instances_of_their_schemas(
    demo: DemoModel, wanted: list[dict[str, Any]], seed: int
) -> None:
    """Several of each schema in one batch. What is cut off must still be the beginning of one."""
    asked = [(schema, grammar_of(schema)) for schema in wanted for _ in range(NUM_SEEDS)]
    requests = [
        demo.request(grammar, seed + i, f"c{next(_ids)}") for i, (_, grammar) in enumerate(asked)
    ]
    demo.run(requests)
    for (schema, _), request in zip(asked, requests, strict=True):
        if demo.is_whole(request):
            answer = json.loads(demo.text(request))
            validator = jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            validator.validate(answer)
    whole = sum(demo.is_whole(request) for request in requests)
    assert whole > len(requests) / 4, "most answers come to an end, of most schemas"


TOOLS: dict[str, dict[str, Any] | None] = {
    "move": {
        "$defs": {"axis": {"enum": ["x", "y"]}},
        "properties": {"axis": {"$ref": "#/$defs/axis"}, "by": {"type": "integer"}},
        "required": ["axis"],
        "additionalProperties": False,
    },
    "say": {
        "properties": {"text": {"type": "string", "maxLength": 20}},
        "required": ["text"],
        "additionalProperties": False,
    },
    "stop": None,
}


@pytest.mark.parametrize("tool_format", matrix(list(ToolFormat), 2))
def test_calls_are_read_as_calls_of_the_functions(demo: DemoModel, tool_format: ToolFormat) -> None:
    """By the parsers that answers go through, and with arguments of the functions' schemas."""
    tools = [OfferedTool(name, schema, "tools") for name, schema in TOOLS.items()]
    calls = CallGrammar(tool_format, tools, is_single=False, find_token=lambda _: None)
    grammar = AnswerGrammar(calls=calls).text()
    requests = [demo.request(grammar, seed, f"t{next(_ids)}", max_tokens=400) for seed in range(48)]
    demo.run(requests)
    called: set[str] = set()
    for request in filter(demo.is_whole, requests):
        parser = tool_format.parser({name: schema or {} for name, schema in TOOLS.items()})
        parts = parser.push(demo.text(request)) + parser.finish()
        assert parts.content == ""
        names = {piece.index: piece.name for piece in parts.calls if piece.name}
        for index, name in names.items():
            text = "".join(piece.arguments for piece in parts.calls if piece.index == index)
            schema = TOOLS[name] or {"additionalProperties": False}
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        called |= set(names.values())
    assert called == set(TOOLS)
