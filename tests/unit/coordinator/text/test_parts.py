"""Answers told apart into reasoning, text and tool calls, however they are cut."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.parts import AnswerParts, Parts, ToolFormat, detect_tool_format
from coordinator.text.parts.interface import PartsParser, Tools
from coordinator.text.parts.reasoning import Reasoning
from pdserve.settings.answers import ToolFormatName

Call = tuple[str, object]
A: Call = ("weather", {"city": "Paris", "days": [1, 2], "deep": {"a": "}]\\"}})
B: Call = ("now", {})
OFFERED: Tools = {"weather": {}, "now": {}, "f": {}}


def read(parser: PartsParser, pieces: list[str]) -> tuple[str, str, list[Call]]:
    """(reasoning, content, calls) of an answer that comes in these pieces."""
    parts = Parts()
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for piece in parts.calls:
        if piece.name is not None:
            assert piece.index not in names, "a name comes once"
            assert piece.index == len(names)
            names[piece.index] = piece.name
        arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    calls = [(names[index], json.loads(arguments[index])) for index in sorted(names)]
    return parts.reasoning, parts.content, calls


def read_any_way(make, text: str) -> tuple[str, str, list[Call]]:
    """The same whole, by characters and in threes."""
    ways = [
        read(make(), [text[i : i + size] for i in range(0, len(text), size)])
        for size in (len(text) or 1, 1, 3)
    ]
    assert ways[0] == ways[1] == ways[2]
    return ways[0]


def hermes(call: Call) -> str:
    body = json.dumps({"name": call[0], "arguments": call[1]})
    return f"<tool_call>\n{body}\n</tool_call>"


def llama(call: Call) -> str:
    return json.dumps({"name": call[0], "parameters": call[1]})


def mistral(call: Call) -> str:
    return json.dumps({"name": call[0], "arguments": call[1]})


def pythonic(call: Call) -> str:
    name, arguments = call
    assert isinstance(arguments, dict)
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


CASES = [
    ("hermes", "", "", []),
    ("hermes", "Just text.\n", "Just text.\n", []),
    ("hermes", hermes(A), "", [A]),
    ("hermes", f"Let me see.\n\n{hermes(A)}\n{hermes(B)}\n", "Let me see.", [A, B]),
    ("hermes", f"{hermes(A)} And then?", "And then?", [A]),
    ("hermes", "a < b, <tool_cal", "a < b, <tool_cal", []),
    ("hermes", "<tool_call> none of that </tool_call>", None, []),
    ("hermes", '<tool_call>{"nom": 1}</tool_call>', None, []),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}', "", [("f", {"x": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [("f", {"x": 1})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ("llama3", llama(A), "", [A]),
    ("llama3", f" <|python_tag|>{llama(A)}; {llama(B)}", "", [A, B]),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", 'It is {"name": "x"}.', 'It is {"name": "x"}.', []),
    ("llama3", "<|python", "<|python", []),
    ("mistral", f"[TOOL_CALLS][{mistral(A)}, {mistral(B)}]", "", [A, B]),
    ("mistral", f"Well. [TOOL_CALLS] [{mistral(A)}]", "Well.", [A]),
    ("mistral", f"[TOOL_CALLS]weather{json.dumps(A[1])}[TOOL_CALLS]now{{}}", "", [A, B]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{json.dumps(A[1])}", "", [A]),
    ("mistral", "[TOOL_CALLS", "[TOOL_CALLS", []),
    ("mistral", "A list: [1, 2]", "A list: [1, 2]", []),
    ("pythonic", f"[{pythonic(A)}, {pythonic(B)}]", "", [A, B]),
    ("pythonic", "[now()]", "", [B]),
    ("pythonic", "<|python_tag|>[now()]", "", [B]),
    ("pythonic", "Text [now()]", "Text [now()]", []),
    ("pythonic", " [", " [", []),
    ("pythonic", " <|python_tag|> [1]", " <|python_tag|> [1]", []),
    ("pythonic", "[f(x=g())]", "[f(x=g())]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[now(", "[now(", []),
    ("pythonic", "[f(x=-1.5, y=None, z=True)]", "", [("f", {"x": -1.5, "y": None, "z": True})]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found(name: str, text: str, content: str | None, calls: list[Call]) -> None:
    found = read_any_way(lambda: ToolFormat(name).parser(OFFERED), text)
    assert found == ("", text if content is None else content, calls)


@pytest.mark.parametrize("name", list(ToolFormat))
@given(text=st.text(alphabet='[]{}()<>/|"\\:;, =nametool_clTOOCAS1x\n', max_size=60))
def test_no_text_is_too_strange(name: ToolFormat, text: str) -> None:
    """Nothing raises, and without a call nothing is lost but the mark that ends a message."""
    parser = name.parser(OFFERED)
    parts = parser.push(text) + parser.finish()
    if not parts.calls:
        shown = text.replace("<|call|>", "") if name is ToolFormat.HARMONY else text
        assert parts.content == shown


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=4), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=4,
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
)
def test_arguments_arrive_unharmed(arguments: dict[str, object], sizes: list[int]) -> None:
    for name, write in (("hermes", hermes), ("llama3", llama)):
        text = write(("f", arguments))
        pieces, start = [], 0
        while start < len(text):
            size = sizes[len(pieces) % len(sizes)]
            pieces.append(text[start : start + size])
            start += size
        assert read(ToolFormat(name).parser(OFFERED), pieces) == ("", "", [("f", arguments)])


def test_arguments_are_streamed() -> None:
    parser = ToolFormat.HERMES.parser(OFFERED)
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "')
    assert parser.push("Once upon").calls[0].arguments == "Once upon"


@pytest.mark.parametrize(
    ("text", "has_begun", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.\n", "Yes."),
        ("Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("Yes.", False, "", "Yes."),
        ("<thin ice>", False, "", "<thin ice>"),
        ("<think>cut o", False, "cut o", ""),
        ("Hm. </thin", True, "Hm. </thin", ""),
        ("A <think>b</think>", False, "", "A <think>b</think>"),
        ("", False, "", ""),
    ],
)
def test_reasoning_is_told_apart(text: str, has_begun: bool, reasoning: str, content: str) -> None:
    found = read_any_way(lambda: Reasoning(has_begun=has_begun), text)
    assert found == (reasoning, content, [])


def test_reasoning_and_calls_of_one_answer() -> None:
    text = f"<think>Which? {hermes(B)}</think>\nI look.\n{hermes(A)}{hermes(B)}"
    whole = AnswerParts(Reasoning(has_begun=False), ToolFormat.HERMES.parser(OFFERED))
    assert read(whole, list(text)) == (f"Which? {hermes(B)}", "I look.", [A, B])
    one = AnswerParts(Reasoning(has_begun=False), ToolFormat.HERMES.parser(OFFERED), max_calls=1)
    assert read(one, list(text)) == (f"Which? {hermes(B)}", "I look.", [A])
    assert one.num_calls == 1


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call>\n<function={{ n }}>\n<parameter={{ k }}>", "qwen3_coder"),
        ("{% if tools %}<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>", None),
        ("{% if tools %}<minimax:tool_call>\n<invoke name=", None),
        ('{% if tools %}<|START_ACTION|>[{"tool_name": "", "parameters": {}}]', None),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ('{% if tools %}{"name": , "parameters": }{% endif %}', "llama3"),
        ("{% if tools %}?{% endif %}", None),
        ("<|start|>assistant<|channel|>final<|message|>{{ content }}", "harmony"),
    ],
)
def test_a_template_tells_the_format(template: str, name: str | None) -> None:
    assert detect_tool_format(template) == (name and ToolFormat(name))


def test_operators_can_name_every_format() -> None:
    assert set(get_args(ToolFormatName)) == {"auto", *ToolFormat}
