"""The channels of gpt-oss in Responses and Messages, as the libraries of their makers read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers

from coordinator.text import ChatTemplate, Tokenizer
from coordinator.text.parts import ToolFormat
from pdserve.protocol import FinishReason
from tests.fakes.generator import EOS, MODEL, FakeGenerator, Step, Tokens
from tests.matrix import matrix
from tests.sdks import anthropic
from tests.unit.coordinator.api.harness import Harness, client_of, served
from tests.unit.coordinator.api.plan.test_harmony import CALL, FINAL, THOUGHT, harmony_tokenizer
from tests.unit.coordinator.api.plan.test_structured import POINT, sent, takes
from tests.unit.coordinator.text import made_tokenizers as made

Part = tuple[str, ...]  # ("thought", text), ("said", text), or ("called", name, arguments)
COMMENT = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
# What the model writes, what of it clients see, and whether it ends with a call.
ANSWERS: dict[str, tuple[str, list[Part]]] = {
    "an answer": (THOUGHT + FINAL + "Yes.", [("thought", "Hm, one?"), ("said", "Yes.")]),
    "a comment, and a call": (
        THOUGHT + COMMENT + CALL,
        [("thought", "Hm, one?"), ("said", "I look."), ("called", "f", '{"x": 1}')],
    ),
    "a comment, and an answer": (COMMENT + FINAL + "Yes.", [("said", "I look."), ("said", "Yes.")]),
    "a thought after a comment": (
        COMMENT + THOUGHT + CALL,
        [("said", "I look."), ("thought", "Hm, one?"), ("called", "f", '{"x": 1}')],
    ),
    "a function that nobody offers": (
        CALL.replace("functions.f", "functions.h"),
        [("said", '{"x": 1}')],
    ),
}
CUT: list[tuple[str, list[Part]]] = [
    ("<|channel|>analysis<|message|>Hm", [("thought", "Hm")]),
    (CALL[:-2], [("called", "f")]),
    (THOUGHT + "<|channel|>comm", [("thought", "Hm, one?")]),
]


@dataclass(frozen=True)
class Library:
    """How its maker's library asks in a protocol, and what it makes of an answer."""

    client: Callable[[Harness], Any]
    ask: Callable[[Any, bool, dict[str, Any]], Awaitable[Any]]  # a client, whether it streams
    parts: Callable[[Any], list[Part]]
    end: Callable[[Any], str]
    tool: dict[str, Any]
    schema: dict[str, Any]  # asks for a point
    must_call: dict[str, Any]
    num_thoughts: Callable[[Any], int]


async def _respond(client: Any, streams: bool, asked: dict[str, Any]) -> Any:
    call = {"model": MODEL, "input": "Hi", **asked}
    if not streams:
        return await client.responses.create(**call)
    async with client.responses.stream(**call) as stream:
        told = [event async for event in stream]
    final = told[-1].response
    assert [event.sequence_number for event in told] == list(range(len(told)))
    begun = [event.item.type for event in told if event.type == "response.output_item.added"]
    done = [event.item for event in told if event.type == "response.output_item.done"]
    assert begun == [item.type for item in final.output]
    assert _items_of(done) == _items_of(final.output)
    return final


def _items(response: Any) -> list[Part]:
    return _items_of(response.output)


def _items_of(items: list[Any]) -> list[Part]:
    made: list[Part] = []
    for item in items:
        match item.type:
            case "reasoning":
                made.append(("thought", item.content[0].text))
            case "message":
                made.append(("said", item.content[0].text))
            case _:
                made.append(("called", item.name, item.arguments))
    return made


def _anthropic(api: Harness) -> Any:
    return anthropic().AsyncAnthropic(base_url=api.server.url, api_key="-", max_retries=0)


async def _write(client: Any, streams: bool, asked: dict[str, Any]) -> Any:
    messages = [{"role": "user", "content": "Hi"}]
    call = {"model": MODEL, "max_tokens": 200, "messages": messages, **asked}
    if not streams:
        return await client.messages.create(**call)
    async with client.messages.stream(**call) as stream:
        return await stream.get_final_message()


def _blocks(message: Any) -> list[Part]:
    made: list[Part] = []
    for block in message.content:
        match block.type:
            case "thinking":
                assert block.signature
                made.append(("thought", block.thinking))
            case "text":
                made.append(("said", block.text))
            case _:
                made.append(("called", block.name, json.dumps(block.input)))
    return made


FUNCTION = {"name": "f", "description": "Look."}
LIBRARIES = {
    "responses": Library(
        client_of,
        _respond,
        _items,
        lambda response: str(response.status),
        {"type": "function", **FUNCTION, "parameters": POINT, "strict": True},
        {"text": {"format": {"type": "json_schema", "name": "point", "schema": POINT}}},
        {"tool_choice": "required"},
        lambda response: int(response.usage.output_tokens_details.reasoning_tokens),
    ),
    "messages": Library(
        _anthropic,
        _write,
        _blocks,
        lambda message: str(message.stop_reason),
        {**FUNCTION, "input_schema": POINT},
        {"output_config": {"format": {"type": "json_schema", "schema": POINT}}},
        {"tool_choice": {"type": "any"}},
        lambda message: int(message.usage.output_tokens_details.thinking_tokens),
    ),
}
each_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES.keys())


@dataclass
class Model:
    """One that writes what it is told to, so many tokens at a time."""

    text: str = FINAL
    size: int = 1
    is_cut: bool = False

    def script(self) -> list[Step]:
        ids = harmony_tokenizer().encode(self.text, add_special_tokens=False)
        steps: list[Step] = [
            Tokens(ids[at : at + self.size]) for at in range(0, len(ids), self.size)
        ]
        end = Tokens([EOS], FinishReason.STOP, EOS)
        return [*steps, Tokens([], FinishReason.LENGTH) if self.is_cut else end]


@asynccontextmanager
async def asked(
    library: Library, tokenizer: Tokenizer
) -> AsyncIterator[tuple[Model, Any, Harness]]:
    """A model with channels, and a client of it."""
    model = Model()
    generator = FakeGenerator(lambda _: model.script())
    async with (
        served(generator, tokenizer, tool_format=ToolFormat.HARMONY) as api,
        library.client(api) as client,
    ):
        yield model, client, api


@each_library
async def test_channels_are_parts_in_their_order(library: Library) -> None:
    async with asked(library, harmony_tokenizer()) as (model, client, _):
        for model.text, expected in ANSWERS.values():
            for streams, model.size in ((False, 3), (True, 1)):
                made = await library.ask(client, streams, {"tools": [library.tool]})
                assert library.parts(made) == expected, (streams, model.size)
                is_call = expected[-1][0] == "called"
                assert library.end(made) in ("completed", "tool_use" if is_call else "end_turn")
                assert (library.num_thoughts(made) > 0) == ("Hm" in model.text)


async def test_messages_say_of_which_phase_they_are() -> None:
    library = LIBRARIES["responses"]
    async with asked(library, harmony_tokenizer()) as (model, client, _):
        model.text = COMMENT + FINAL + "Yes."
        made = await library.ask(client, False, {})
        assert [item.phase for item in made.output] == ["commentary", "final_answer"]
        model.text = "Yes."
        assert (await library.ask(client, False, {})).output[0].phase is None


@each_library
async def test_what_is_cut_off_says_so(library: Library) -> None:
    async with asked(library, harmony_tokenizer()) as (model, client, _):
        model.is_cut = True
        for model.text, expected in CUT:
            for streams in (False, True):
                made = await library.ask(client, streams, {"tools": [library.tool]})
                assert [part[:2] for part in library.parts(made)] == expected, model.text
                assert library.end(made) in ("incomplete", "max_tokens")


@pytest.mark.parametrize("library", matrix(LIBRARIES.values(), 1), ids=LIBRARIES.keys())
async def test_constraints_hold_in_their_channels(library: Library) -> None:
    tokenizer = harmony_tokenizer()
    async with asked(library, tokenizer) as (_, client, api):
        await library.ask(client, False, library.schema)
        output = sent(api)
        await library.ask(client, True, {"tools": [library.tool], **library.must_call})
        call = sent(api)
    for before in ("", THOUGHT):
        assert takes(output, before + FINAL + '{"x": 1}', tokenizer)
        assert not takes(output, before + FINAL + '{"x": "1"}', tokenizer)
        assert not takes(output, before + '{"x": 1}', tokenizer)
        assert takes(call, before + CALL, tokenizer)
        assert not takes(call, before + CALL.replace("1", '"1"'), tokenizer)
        assert not takes(call, before + FINAL + '{"x": 1}', tokenizer)


# As strict as that of gpt-oss: a call a message, with a thought or with a comment.
TEMPLATE = (
    "{% set last = namespace(name=none) %}[{{ reasoning_effort }}]"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if last.name is none %}{{ raise_exception('a result of no call') }}{% endif %}"
    "{{ last.name }}={{ message.content }} "
    "{% elif message.tool_calls is defined %}"
    "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    "({{ message.thinking or message.content }})"
    "{% set call = message.tool_calls[0].function %}{% set last.name = call.name %}"
    "{{ call.name }}{{ call.arguments | tojson }} "
    "{% else %}{{ message.role }}: {{ message.content }} {% endif %}{% endfor %}"
    "{% if tools %}{% endif %}"
)


def strict_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(made.byte_level_json())
    return Tokenizer(backend, chat_template=ChatTemplate(TEMPLATE, {}))


TURNS: dict[str, dict[str, Any]] = {
    "responses": {
        "reasoning": {"effort": "minimal"},
        "input": [
            {"role": "user", "content": "Hi"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {
                "type": "message",
                "role": "assistant",
                "phase": "commentary",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": '{"x": 2}'},
            {"type": "function_call_output", "call_id": "b", "output": "two"},
            {"type": "function_call_output", "call_id": "a", "output": "one"},
        ],
    },
    "messages": {
        "thinking": {"type": "disabled"},
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "-"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
                    {"type": "tool_use", "id": "b", "name": "g", "input": {"x": 2}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "b", "content": "two"},
                    {"type": "tool_result", "tool_use_id": "a", "content": "one"},
                ],
            },
        ],
    },
}


@pytest.mark.parametrize("protocol", TURNS)
async def test_what_comes_back_is_what_the_template_takes(protocol: str) -> None:
    """A thought and a comment before calls are one, and calls one by one, with their results."""
    library, tokenizer = LIBRARIES[protocol], strict_tokenizer()
    async with asked(library, tokenizer) as (_, client, api):
        await library.ask(client, False, TURNS[protocol] | {"tools": [library.tool]})
        prompt = tokenizer.decode(api.generator.last.request.prompt.token_ids)
    assert prompt == '[low]user: Hi (Hm.\nI look.)f{"x": 1} f=one ()g{"x": 2} g=two '
