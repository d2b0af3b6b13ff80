"""Calls that are no JSON: the client sees what the model wrote, in every protocol, and may say so.

What is broken, and what has no end, is in `tests/unit/coordinator/text/test_broken_calls.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.api.answer.choice import ChoiceDelta
from coordinator.api.answer.pieces import AnswerPieces
from coordinator.text.parts import AnswerParts, ToolFormat
from coordinator.text.parts.reasoning import Reasoning
from tests.fakes.generator import MODEL, FakeGenerator, says, tool_tokenizer
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import Harness, client_of, events_of, served
from tests.unit.coordinator.text.test_broken_calls import BROKEN, CALL, CODER, MARKED, WAYS

TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("alpha", "now")
]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
Told = list[tuple[str, str]]
BOTH: dict[str, list[tuple[str, Told]]] = {
    **{
        way.split()[0]: [
            (WAYS[way][0].replace("BROKEN", broken) + WAYS[way][1], [("alpha", broken)])
            for broken in BROKEN[::5]
        ]
        for way in ("hermes", "llama3", "mistral")
    },
    "qwen3_coder": [
        (f"{CODER}{CALL}{MARKED.replace(MARKED[12:-13], '<function=now></function>')}",
         [("alpha", '{"text": "VALUE"}')]),
    ],
    "pythonic": [("[alpha(a=01, b={c: 1}), now()]", [("alpha", '{"a": 01, "b": {c: 1}}')])],
}  # fmt: skip


@pytest.mark.parametrize("name", matrix(BOTH, 2))
async def test_what_the_model_wrote_is_told_and_taken_back(name: str) -> None:
    generator = FakeGenerator()
    async with served(generator, tool_tokenizer(), tool_format=ToolFormat(name)) as api:
        for text, told in BOTH[name]:
            told = [*told, ("now", "{}")]
            generator.script = says(text, per_event=3)
            assert await chat(api) == told
            assert await streamed_chat(api) == told
            items = await response(api)
            assert [(item["name"], item["arguments"]) for item in items] == told
            assert {item["status"] for item in items} == {"completed"}
            assert await streamed_response(api) == told
            await taken_back(api, told)


async def test_text_behind_a_call_that_only_the_end_completes_is_not_inside_of_it() -> None:
    """The last characters of its arguments are certain together with that text."""
    call, told = f"{CODER}{CALL.rstrip()}\nBye", [("alpha", '{"text": "VALUE"}')]
    generator = FakeGenerator(says(call, per_event=3))
    async with served(generator, tool_tokenizer(), tool_format=ToolFormat.QWEN3_CODER) as api:
        assert [(item["name"], item["arguments"]) for item in await response(api)] == told
        assert await streamed_response(api) == told
        messages = [{"role": "user", "content": "Hi"}]
        tools = [{"name": "alpha", "input_schema": {"type": "object"}}]
        body = {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": 99}
        async with api.client.post("/v1/messages", json=body) as answer:
            blocks = (await answer.json())["content"]
    assert [block.get("input", block.get("text")) for block in blocks] == [{"text": "VALUE"}, "Bye"]


def test_text_between_calls_that_are_certain_only_together_stays_there() -> None:
    """They end reasoning without an end of its own, and all that with the answer."""
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    text = f"Hm. {call}\nand {call} Bye"
    reasoning = Reasoning(True, call_begins=["<tool_call>"])
    pieces = AnswerPieces(AnswerParts(reasoning, ToolFormat.HERMES.parser({"now": {}})))
    told = [
        (p.parts.reasoning, p.parts.content, len(p.parts.calls))
        for p in pieces.take_in(ChoiceDelta(0, text, [], "stop"))
    ]
    assert [(a.strip(), b.strip(), n) for a, b, n in told] == [
        ("Hm.", "", 0),
        ("", "", 1),
        ("", "and", 0),
        ("", "", 1),
        ("", "Bye", 0),
    ]


async def chat(api: Harness) -> Told:
    async with api.chat(tools=TOOLS) as answer:
        choice = (await answer.json())["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(call["name"], call["arguments"]) for call in calls]


async def streamed_chat(api: Harness) -> Told:
    async with api.chat(tools=TOOLS, stream=True) as answer:
        choices = [event["choices"][0] for event in events_of(await answer.read())[:-1]]
    assert choices[-1]["finish_reason"] == "tool_calls"
    told: dict[int, list[str]] = {}
    for choice in choices:
        for call in choice["delta"].get("tool_calls") or []:
            of_call = told.setdefault(call["index"], ["", ""])
            of_call[0] += call["function"].get("name") or ""
            of_call[1] += call["function"]["arguments"]
    return [(call, arguments) for call, arguments in told.values()]


async def response(api: Harness) -> list[Any]:
    body = {"model": MODEL, "input": "Hi", "tools": FLAT}
    async with api.client.post("/v1/responses", json=body) as answer:
        return [i for i in (await answer.json())["output"] if i["type"] == "function_call"]


async def streamed_response(api: Harness) -> Told:
    asked: Any = {"model": MODEL, "input": "Hi", "tools": FLAT, "stream": True}
    async with client_of(api) as client:
        events = [event async for event in await client.responses.create(**asked)]
    calls = [e.item for e in events if e.type == "response.output_item.done"]
    done = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    told = [(call.name, call.arguments) for call in calls if call.type == "function_call"]
    assert done == [arguments for _, arguments in told]
    assert "".join(pieces) == "".join(done)
    return told


async def taken_back(api: Harness, told: Told) -> None:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(told)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}]
    async with api.chat(messages=[*history, *results], tools=TOOLS) as answer:
        assert answer.status == 200, await answer.text()
    items: list[Any] = [
        {"type": "function_call", "call_id": f"c{i}", "name": name, "arguments": arguments}
        for i, (name, arguments) in enumerate(told)
    ]
    items += [
        {"type": "function_call_output", "call_id": i["call_id"], "output": ""} for i in items
    ]
    body = {"model": MODEL, "input": items, "tools": FLAT}
    async with api.client.post("/v1/responses", json=body) as answer:
        assert answer.status == 200, await answer.text()
