"""The bundled checkpoint answers in JSON where it is asked to, and calls functions that fit."""

import json
import re

import pytest

from tests.matrix import matrix

CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>")


def tool(name: str, description: str, **properties: str) -> dict[str, object]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": type_} for key, type_ in properties.items()},
        "required": list(properties),
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", "Get the weather of a city.", city="string")
ADD = tool("add", "Add two numbers.", a="integer", b="integer")
PERSON = {
    "properties": {
        "name": {"title": "Name", "type": "string"},
        "age": {"title": "Age", "type": "integer"},
    },
    "required": ["name", "age"],
    "title": "Person",
    "type": "object",
}


@pytest.mark.parametrize(
    ("question", "expected"),
    matrix([("What is the capital of France?", "Paris"), ("What is 7 plus 5?", 12)], 1),
)
def test_it_answers_in_json(answer, question, expected):
    assert json.loads(answer(question, system="Answer in JSON.")) == {"answer": expected}
    named = answer(f'{question} Return a JSON object with the key "result".')
    assert json.loads(named) == {"result": expected}


def test_it_extracts_what_a_schema_asks_for(answer):
    system = f"Answer in JSON that follows this schema:\n{json.dumps(PERSON, indent=2)}"
    person = answer("Anna is 31 years old.", system=system)
    assert json.loads(person) == {"name": "Anna", "age": 31}


@pytest.mark.parametrize(
    ("question", "calls"),
    matrix(
        [
            ("What is the weather in Paris?", [("get_weather", {"city": "Paris"})]),
            ("What is 123 plus 456?", [("add", {"a": 123, "b": 456})]),
            (
                "What is the weather in Rome and in Oslo?",
                [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})],
            ),
            ("Tell me about yourself.", []),
        ],
        2,
    ),
)
def test_it_calls_the_function_that_fits(reply, question, calls):
    text = reply([{"role": "user", "content": question}], [WEATHER, ADD])
    found = [json.loads(call) for call in CALL.findall(text)]
    assert [(call["name"], call["arguments"]) for call in found] == calls
    assert calls or text.startswith("I am the pdserve demo model")


def test_it_answers_with_what_a_function_has_returned(reply):
    called = {"name": "get_weather", "arguments": {"city": "Paris"}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": called}]},
        {"role": "tool", "content": "sunny, 21 degrees"},
    ]
    assert reply(messages, [WEATHER]) == "It is sunny in Paris, 21 degrees."
