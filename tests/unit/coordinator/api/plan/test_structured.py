"""Structured output at the API: what nodes are told to enforce, and what is refused by name."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

import openai
import pydantic
import pytest
import tokenizers

from coordinator.api.read.fields import MAX_ANSWERS
from coordinator.text import Tokenizer
from coordinator.text.grammars import (
    AnswerGrammar,
    CallGrammar,
    GrammarChecker,
    OfferedTool,
    Output,
    OutputKind,
)
from coordinator.text.grammars.process import GrammarProcess
from coordinator.text.parts import ToolFormat
from pdserve.grammar import (
    MAX_GRAMMAR_CHARS,
    Prepared,
    Vocabulary,
    make_vocabulary,
    new_matcher,
)
from pdserve.shared.errors import (
    GrammarFailed,
    InvalidRequest,
    NoTokenLeft,
    Overloaded,
    PdserveError,
)
from tests.fakes.generator import (
    EOS,
    FakeGenerator,
    compiled,
    tiny_tokenizer,
    tool_tokenizer,
)
from tests.fakes.tokenizer import FakeTokenizer
from tests.matrix import matrix
from tests.unit.coordinator.api.answer.test_tools import MESSAGES
from tests.unit.coordinator.api.harness import Harness, served
from tests.unit.coordinator.text import made_tokenizers as made

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}


def tool(name: str, parameters: dict[str, Any] | None = POINT) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


@cache
def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return make_vocabulary(tokenizer.to_json(), tokenizer.num_ids, [EOS])


def takes(grammar: str, text: str, tokenizer: Tokenizer | None = None) -> bool:
    """Whether an answer may be exactly this text."""
    tokenizer = tokenizer or tiny_tokenizer()
    matcher = new_matcher(vocabulary_of(tokenizer), grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def sent(api: Harness) -> str:
    return api.generator.last.request.sampling.grammar


WANTED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ['{"a": [1, null]}', "{}"], ["[]", "{} "]),
    ({"response_format": {"type": "json_object", "schema": POINT}}, ['{"x": 1}'], ["{}"]),
    ({"response_format": FORMAT}, ['{"x": 1}', '{\n  "x": 1\n}'], ['{"x": "1"}', "{}"]),
    ({"guided_json": POINT}, ['{"x":1}'], ['{"x":  1}']),
    ({"guided_json": json.dumps(POINT)}, ['{"x":1}'], ["1"]),
    ({"guided_regex": "a/[bc]+"}, ["a/bcb"], ["a/", "xa/b"]),
    ({"regex": "a/[bc]+"}, ["a/bcb"], ["a/", "xa/b"]),
    ({"json_schema": json.dumps(POINT)}, ['{"x":1}'], ["1"]),
    ({"ebnf": 'root ::= "a" b\nb ::= "b"+'}, ["abb"], ["a"]),
    ({"guided_choice": ["yes", "no", 'é"\n']}, ["yes", 'é"\n'], ["maybe", "yesno"]),
    ({"guided_grammar": 'start: "a" b\nb: "b"+'}, ["abb"], ["a"]),
    ({"guided_grammar": 'root ::= "a" b\nb ::= "b"+'}, ["abb"], ["a"]),
    ({"structured_outputs": {"json": POINT}}, ['{"x": 1}'], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["1"]),
    ({"structured_outputs": {"regex": "a|b"}}, ["a"], ["ab"]),
    ({"structured_outputs": {"choice": ["a", "b"]}}, ["b"], ["c"]),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, ["a"], ["b"]),
]


async def test_what_is_wanted_is_what_nodes_enforce() -> None:
    async with served() as api:
        for body, good, bad in WANTED:
            for ask in (api.chat, api.complete):
                async with ask(**body) as response:
                    assert response.status == 200, await response.text()
            grammar = sent(api)
            assert [text for text in good if not takes(grammar, text)] == [], body
            assert [text for text in bad if takes(grammar, text)] == [], body


async def test_as_many_choices_as_may_be_asked_for() -> None:
    """Their grammar can be followed behind the first token, too."""
    choices = [f"{i * i}" for i in range(MAX_ANSWERS)]
    async with served() as api:
        for given, good in ((choices, choices[-1]), (["same"] * MAX_ANSWERS, "same")):
            async with api.chat(guided_choice=given) as response:
                assert response.status == 200, await response.text()
            assert takes(sent(api), good)
            assert not takes(sent(api), good + "x")


async def test_any_text_will_do_if_nothing_is_wanted() -> None:
    async with served() as api:
        for body in ({}, {"response_format": {"type": "text"}}, {"guided_json": None}):
            async with api.chat(**body) as response:
                assert response.status == 200
            assert sent(api) == ""


async def test_the_sdk_asks_for_a_class() -> None:
    class Point(pydantic.BaseModel):
        x: int
        label: str | None

    answers = FakeGenerator()
    async with served(answers) as api, openai.AsyncOpenAI(base_url=api.base_url, api_key="-") as c:
        with pytest.raises(pydantic.ValidationError):  # the fake does not follow grammars
            await c.chat.completions.parse(model="alias", messages=MESSAGES, response_format=Point)
        assert takes(sent(api), '{"x": 1, "label": null}')
        assert not takes(sent(api), '{"x": 1}')


def schema_of(**keywords: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": keywords}}


CONTROL = {"type": "string", "pattern": r"\cC"}  # ECMA-262 has it


def must_call(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [tool("f"), tool("g", parameters)], "tool_choice": "required"}


SCHEMA = "response_format.json_schema.schema"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "json_object"),
    ({"response_format": schema_of(uniqueItems=True, type="array")}, SCHEMA, "'uniqueItems'"),
    ({"response_format": schema_of(**{"not": {}, "if": {}, "then": {}})}, SCHEMA, "'not' in '#'"),
    ({"response_format": schema_of(oneOf=[{}, {}])}, SCHEMA, "'oneOf'"),
    ({"response_format": schema_of(type="string", format="regex")}, SCHEMA, "'format'"),
    ({"response_format": schema_of(type="string", pattern="(?=a)")}, SCHEMA, "look-around"),
    ({"response_format": schema_of(**{"$ref": "http://a/b"})}, SCHEMA, "'$ref'"),
    ({"response_format": schema_of(type="thing")}, SCHEMA, "thing"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_json": "3"}, "guided_json", "schema"),
    ({"guided_json": "false"}, "guided_json", "false"),
    ({"guided_regex": "("}, "guided_regex", "unclosed"),
    ({"guided_regex": r"[^\s\S]"}, "guided_regex", "no text matches"),
    (
        {"guided_grammar": "start: " + " | ".join(f'"a" "{i}"' for i in range(3000))},
        "guided_grammar",
        "2000",
    ),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "cannot be combined"),
    ({"guided_choice": []}, "guided_choice", "length"),
    ({"guided_grammar": "start: b"}, "guided_grammar", "b"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "GBNF"),
    ({"guided_grammar": 'start: "' + "a" * 70_000 + '"'}, "guided_grammar", "65536"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"made_up": 1}}, "structured_outputs.made_up", "made_up"),
    ({"guided_regex": "a", "min_tokens": 1, "max_tokens": 3}, "min_tokens", "structured"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "structured"),
    (
        {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "'g'",
    ),
    ({"tool_choice": "required"}, "tool_choice", "no 'tools'"),
    (
        {"tools": [tool("f", {"type": "array"})], "tool_choice": "required"},
        "tools[0].function.parameters",
        "object",
    ),
    (
        must_call({"properties": {"a": {"not": {}}}}),
        "tools[1].function.parameters",
        "'not' in '#/properties/a'",
    ),
    (
        must_call({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": CONTROL}}),
        "tools[1].function.parameters",
        "in '#/$defs/a'",
    ),
    ({"response_format": schema_of(const=1234567890123456789)}, SCHEMA, "'const' in '#'"),
    ({"guided_json": '{"minimum": 1e400}'}, "guided_json.minimum", "1e400"),
]


async def test_what_cannot_be_enforced_is_refused_by_name() -> None:
    async with served(None, tool_tokenizer()) as api:
        for body, param, said in REFUSED:
            async with api.chat(**body) as response:
                answer = await response.json()
            assert response.status == 400, (body, answer)
            assert answer["error"]["param"] == param
            assert said in answer["error"]["message"]
        assert api.generator.generations == []


# ---- tool_choice ---------------------------------------------------------------------------------

# Each format's own spelling of: f({"x": 1}), then g({}).
ONE = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    ToolFormat.LLAMA3: '{"name": "f", "parameters": {"x": 1}}',
    ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
    ToolFormat.PYTHONIC: "[f(x=1)]",
    ToolFormat.QWEN3_CODER: "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n"
    "</function>\n</tool_call>",
}
TWO = {
    ToolFormat.HERMES: ONE[ToolFormat.HERMES]
    + '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ToolFormat.LLAMA3: ONE[ToolFormat.LLAMA3] + '; {"name": "g", "parameters": {}}',
    ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, '
    '{"name": "g", "arguments": {}}]',
    ToolFormat.PYTHONIC: "[f(x=1), g()]",
    ToolFormat.QWEN3_CODER: ONE[ToolFormat.QWEN3_CODER]
    + "\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
}
TOOLS = [tool("f"), tool("g", None)]
OFFERED: dict[str, dict[str, Any]] = {"f": {"properties": {"x": {"type": "integer"}}}, "g": {}}


def renamed(text: str, old: str, new: str) -> str:
    """A text with other calls, in any format."""
    for mark in ('"{}"', "={}>", "[{}(", " {}("):
        text = text.replace(mark.format(old), mark.format(new))
    return text


F = {"type": "function", "function": {"name": "f"}}


async def grammar_of(api: Harness, **body: Any) -> str:
    async with api.chat(tools=TOOLS, **body) as response:
        assert response.status == 200, await response.text()
    return sent(api)


@pytest.mark.parametrize("tool_format", matrix(ONE, 2))
async def test_calls_are_enforced(tool_format: ToolFormat) -> None:
    one, two = ONE[tool_format], TWO[tool_format]
    wrong = one.replace("1", '"1"')
    cases = [
        ({"tool_choice": "required"}, [one, two], ["Hello", "", wrong, renamed(one, "f", "h")]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [one], [two, "Hello"]),
        ({"tool_choice": F}, [one], [two, wrong, renamed(one, "f", "g")]),
    ]
    if tool_format not in (ToolFormat.LLAMA3, ToolFormat.PYTHONIC):
        both = {"tool_choice": "auto", "response_format": FORMAT}
        cases.append((both, [one, two, '{"x": 1}'], ["Hello", wrong]))
    async with served(None, tool_tokenizer(), tool_format=tool_format) as api:
        for body, good, bad in cases:
            grammar = await grammar_of(api, **body)
            assert [text for text in good if not takes(grammar, text)] == [], body
            assert [text for text in bad if takes(grammar, text)] == [], body
        assert await grammar_of(api, tool_choice="auto") == "", "that is up to the model"


STRICT_F = {"type": "function", "function": tool("f")["function"] | {"strict": True}}
ANY_H = tool("h", {"not": {}})  # not strict, so a schema that cannot be enforced does no harm


@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize(
    "tool_format", matrix([ToolFormat.HERMES, ToolFormat.MISTRAL, ToolFormat.QWEN3_CODER], 1)
)
async def test_strict_calls_are_enforced_where_the_model_decides(
    tool_format: ToolFormat, special: bool | None
) -> None:
    one = ONE[tool_format]
    unlisted = renamed(one, "f", "h").replace('"x": 1', '"y": [2]').replace("=x>", "=y>")
    two = renamed(TWO[tool_format], "g", "h")
    good = ["Hello", "", "a <tool", "{", one, "Well\n" + one, unlisted, two, "Well: " + two]
    good += ["<think>Well.</think>\n" + text for text in ("", "Hello", one, two)]
    wrong = one.replace("1", '"1"')
    bad = [wrong, "Well " + wrong, renamed(one, "f", "i"), one + "!", one[:-1], one + wrong]
    marks = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>"]
    tokenizer = with_tokens(*(marks if special is not None else []), special=bool(special))
    async with served(None, tokenizer, tool_format=tool_format) as api:
        async with api.chat(tools=[STRICT_F, ANY_H]) as response:
            assert response.status == 200, await response.text()
        grammar = sent(api)
        assert [text for text in good if not takes(grammar, text, tokenizer)] == []
        assert [text for text in bad if takes(grammar, text, tokenizer)] == []
        async with api.chat(tools=[STRICT_F, ANY_H], parallel_tool_calls=False) as response:
            assert response.status == 200, await response.text()
        assert takes(sent(api), "Well\n" + one, tokenizer)
        assert not takes(sent(api), two, tokenizer)


@pytest.mark.parametrize("tool_format", ONE)
def test_what_is_enforced_is_what_is_understood(tool_format: ToolFormat) -> None:
    parser = tool_format.parser(OFFERED)
    parts = parser.push(TWO[tool_format]) + parser.finish()
    assert not parts.content
    found: dict[int, list[str]] = {}
    for piece in parts.calls:
        found.setdefault(piece.index, ["", ""])
        found[piece.index][0] += piece.name or ""
        found[piece.index][1] += piece.arguments
    assert {i: (name, json.loads(text)) for i, (name, text) in found.items()} == {
        0: ("f", {"x": 1}),
        1: ("g", {}),
    }


@pytest.mark.parametrize("tool_format", [ToolFormat.PYTHONIC, ToolFormat.QWEN3_CODER])
def test_arguments_of_any_name_have_the_values_that_the_schema_allows(
    tool_format: ToolFormat,
) -> None:
    counts = {"type": "object", "additionalProperties": {"type": "integer"}}
    calls = CallGrammar(tool_format, [OfferedTool("f", counts, "p")], True, lambda _: None)
    grammar, one = AnswerGrammar(calls=calls).text(), ONE[tool_format]
    assert takes(grammar, one)
    assert takes(grammar, one.replace("x", "other_name"))
    assert not takes(grammar, one.replace("1", '"1"'))
    assert not takes(grammar, one.replace("1", "true"))


@pytest.mark.parametrize(
    ("tool_format", "body", "said"),
    [
        (ToolFormat.PYTHONIC, {"response_format": FORMAT}, "cannot be told"),
        (ToolFormat.LLAMA3, {"response_format": FORMAT}, "cannot be told"),
    ],
)
async def test_calls_that_no_grammar_is_made_for_are_refused(
    tool_format: ToolFormat, body: dict[str, Any], said: str
) -> None:
    async with (
        served(None, tool_tokenizer(), tool_format=tool_format) as api,
        api.chat(tools=TOOLS, **body) as response,
    ):
        answer = await response.json()
        assert response.status == 400
        assert answer["error"]["param"] == "tool_choice"
        assert said in answer["error"]["message"]


def with_tokens(*marks: str, special: bool = True) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(made.byte_level_json())
    backend.add_tokens([tokenizers.AddedToken(m, special=special, normalized=False) for m in marks])
    return Tokenizer(backend, chat_template=compiled())


@pytest.mark.parametrize("special", matrix([True, False], 1))  # not special: Qwen's
async def test_marks_are_tokens_where_there_are_such(special: bool) -> None:
    tokenizer = with_tokens("<tool_call>", "</tool_call>", special=special)
    async with (
        served(None, tokenizer) as api,
        api.chat(tools=TOOLS, tool_choice="required") as response,
    ):
        assert response.status == 200, await response.text()
        assert takes(sent(api), TWO[ToolFormat.HERMES], tokenizer)


async def test_newer_mistral_names_calls_before_their_arguments() -> None:
    tokenizer = with_tokens("[TOOL_CALLS]", "[ARGS]")
    async with (
        served(None, tokenizer, tool_format=ToolFormat.MISTRAL) as api,
        api.chat(tools=TOOLS, tool_choice="required") as response,
    ):
        assert response.status == 200, await response.text()
        text = '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}'
        assert takes(sent(api), text, tokenizer)
    parser = ToolFormat.MISTRAL.parser(OFFERED)
    calls = (parser.push(text) + parser.finish()).calls
    assert [piece.name for piece in calls if piece.name] == ["f", "g"]


@pytest.mark.parametrize("special", matrix([True, False, None], 1))
@pytest.mark.parametrize("thinks", [True, False])
async def test_reasoning_comes_before_what_is_wanted(thinks: bool, special: bool | None) -> None:
    """Marks are special tokens, or tokens like others (Qwen 3), or spelled out (None)."""
    marks = () if special is None else ("<think>", "</think>")
    tokenizer = with_tokens(*marks, special=bool(special))
    body = {"response_format": FORMAT, "chat_template_kwargs": {"thinks": thinks}}
    async with (
        served(None, tokenizer, splits_reasoning=True) as api,
        api.chat(**body) as response,
    ):
        assert response.status == 200, await response.text()
        begin = "" if thinks else "<think>"
        reasoned = begin + 'Well, {"x": 2}?\n</think>\n\n{"x": 1}'
        assert takes(sent(api), reasoned, tokenizer) is (thinks or special is not None)
        assert not takes(sent(api), begin + "Well.\n</think>\n\nHello", tokenizer)
        assert takes(sent(api), '{"x": 1}', tokenizer) is not thinks


@pytest.mark.parametrize("error", [GrammarFailed("no mask"), NoTokenLeft("no token")])
async def test_what_fails_later_is_the_clients_fault(error: PdserveError) -> None:
    async with served(FakeGenerator(script=lambda _: [error])) as api:
        async with api.chat() as response:
            answer = await response.json()
            assert response.status == 400
            assert answer["error"]["code"] == error.code
            assert answer["error"]["message"] == error.message
        async with api.chat(stream=True) as response:
            assert response.status == 400, "nothing of the stream has been sent"


# ---- hostile grammars ----------------------------------------------------------------------------


def regex(text: str) -> Callable[[], str]:
    return AnswerGrammar(Output(OutputKind.REGEX, text, "guided_regex")).text


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(GrammarProcess(tiny_tokenizer(), cpu_s=0.1))
    yield checker
    await checker.close()


async def test_a_grammar_that_takes_too_long_is_ended_and_remembered(
    checker: GrammarChecker,
) -> None:
    """It would take two seconds of a core, and is not yet told by its size."""
    slow = regex("(a{400}){450}")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="too long"):
            await checker.checked(slow, "guided_regex", "t")
        assert checker._process.pid is None, "nothing goes on computing"
    quick = await checker.checked(regex("a+"), "guided_regex", "t")
    assert takes(quick, "aaa")


async def test_a_process_that_was_killed_is_begun_anew(checker: GrammarChecker) -> None:
    await checker.checked(regex("a+"), "guided_regex", "t")
    pid = checker._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while checker._process.pid is not None:
        await asyncio.sleep(0.01)
    assert takes(await checker.checked(regex("b+"), "guided_regex", "t"), "bb")


class WatchedProcess(GrammarProcess):
    """Counts what is asked for, and never answers the tenant "late"."""

    def __init__(self) -> None:
        super().__init__(tiny_tokenizer(), cpu_s=0.1)
        self.asked: list[str] = []

    async def prepare(self, document: str, tenant: str) -> Prepared:
        self.asked.append(document)
        if tenant == "late":
            await asyncio.Event().wait()
        return await super().prepare(document, tenant)


@pytest.fixture
async def process() -> AsyncIterator[WatchedProcess]:
    process = WatchedProcess()
    yield process
    await process.close()


async def test_who_asks_for_the_same_waits_for_one_answer(process: WatchedProcess) -> None:
    checker = GrammarChecker(process, max_waiting=1)
    same = [asyncio.create_task(checker.checked(regex("a+"), "p", "t")) for _ in range(3)]
    while not checker._under_way:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="other grammars"):
        await checker.checked(regex("b+"), "p", "t")
    assert takes(await checker.checked(regex("c+"), "p", "another"), "cc")
    same[0].cancel()
    _, second, third = await asyncio.gather(*same, return_exceptions=True)
    assert second == third
    assert len(process.asked) == 2
    assert takes(await checker.checked(regex("b+"), "p", "t"), "bb"), "who went away left no answer"


async def test_nobody_waits_for_the_turn_of_another_tenant_who_asks_for_the_same(
    process: WatchedProcess,
) -> None:
    checker = GrammarChecker(process)
    late = asyncio.create_task(checker.checked(regex("a+"), "p", "late"))
    while not checker._under_way:
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        assert takes(await checker.checked(regex("a+"), "p", "another"), "aa")
    late.cancel()


async def test_what_has_become_too_long_is_neither_asked_nor_remembered(
    process: WatchedProcess,
) -> None:
    checker = GrammarChecker(process)
    with pytest.raises(InvalidRequest, match=r"'p' cannot be enforced: .* characters; at most"):
        await checker.checked(lambda: "x" * (MAX_GRAMMAR_CHARS + 1), "p", "t")
    assert process.asked == []
    assert not checker._verdicts


async def test_a_tokenizer_that_cannot_be_told_as_bytes() -> None:
    class Untold(FakeTokenizer):
        def to_json(self) -> str:
            return '{"model": {}}'

    checker = GrammarChecker(GrammarProcess(Untold()))
    try:
        with pytest.raises(InvalidRequest, match="cannot be used with this tokenizer"):
            await checker.checked(regex("a"), "guided_regex", "t")
    finally:
        await checker.close()
