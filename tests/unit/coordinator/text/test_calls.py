"""Calls in every format a family writes: found however the text is cut, and all else is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.parts import CallPiece, Parts, ToolFormat
from coordinator.text.parts.interface import Tools
from tests.matrix import matrix

Call = tuple[str, dict[str, Any]]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"place": {"type": "object"}},
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "place": {"$ref": "#/$defs/place"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "unit": {"enum": ["C", "F", 5]},
    },
}
TOOLS: Tools = {"alpha": SCHEMA, "get-beta.2": SCHEMA, "now": {}}


def read(
    name: str, pieces: Sequence[str], tools: Tools = TOOLS, *, is_cut: bool = False
) -> tuple[Parts, bool]:
    """The parts of an answer that comes in these pieces, and whether it ends inside a call."""
    parser, parts = ToolFormat(name).parser(tools), Parts()
    for piece in pieces:
        parts += parser.push(piece)
    return parts + parser.finish(is_cut=is_cut), parser.is_in_call


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    pieces, start = [], 0
    while start < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[start : start + size])
        start += size
    return pieces


def calls_of(parts: Parts) -> list[Call]:
    told: dict[int, list[str]] = {}
    for piece in parts.calls:
        told.setdefault(piece.index, []).extend([piece.name or "", piece.arguments])
    return [("".join(t[::2]), json.loads("".join(t[1::2]))) for t in told.values()]


def as_json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]})


def as_tags(call: Call) -> str:
    values = (
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>"
        for key, value in call[1].items()
    )
    return "\n".join([f"<function={call[0]}>", *values, "</function>"])


def as_python(call: Call, show: Callable[[Any], str] = repr) -> str:
    return f"{call[0]}({', '.join(f'{key}={show(value)}' for key, value in call[1].items())})"


Write = Callable[[list[Call]], str]
FAMILIES: dict[str, tuple[str, Write]] = {
    "hermes": (
        "hermes",
        lambda c: "\n".join(f"<tool_call>\n{as_json(x)}\n</tool_call>" for x in c),
    ),
    "llama3": ("llama3", lambda c: "; ".join(as_json(x, "parameters") for x in c)),
    "llama3 tag": (
        "llama3",
        lambda c: "<|python_tag|>" + "; ".join(as_json(x, "parameters") for x in c),
    ),
    "mistral v3": ("mistral", lambda c: f"[TOOL_CALLS] [{', '.join(map(as_json, c))}]"),
    "mistral v7": ("mistral", lambda c: f"[TOOL_CALLS][{', '.join(map(as_json, c))}]"),
    "mistral v11": (
        "mistral",
        lambda c: "".join(
            f"[TOOL_CALLS]{x[0]}[CALL_ID]abcdefgh{i}[ARGS]{json.dumps(x[1])}"
            for i, x in enumerate(c)
        ),
    ),
    "mistral v13": (
        "mistral",
        lambda c: "".join(f"[TOOL_CALLS]{x[0]}[ARGS]{json.dumps(x[1])}" for x in c),
    ),
    "qwen3_coder": (
        "qwen3_coder",
        lambda c: "\n".join(f"<tool_call>\n{as_tags(x)}\n</tool_call>" for x in c),
    ),
    "qwen3_coder bare": ("qwen3_coder", lambda c: "\n".join(map(as_tags, c))),
    "pythonic": ("pythonic", lambda c: f"[{', '.join(map(as_python, c))}]"),
    "pythonic json": (
        "pythonic",
        lambda c: (
            f"<|python_start|>[{','.join(as_python(x, json.dumps) for x in c)}]<|python_end|>"
        ),
    ),
}
WORDS = st.text(alphabet="abc \n\t'\"\\{}[]<>/=,;:é", max_size=12)
VALUES = {
    "text": WORDS | st.sampled_from(["</tool_call>", "\n</function>\n", "[TOOL_CALLS]"]),
    "count": st.integers(-(10**20), 10**20),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "items": st.lists(WORDS | st.integers() | st.none(), max_size=3),
    "place": st.dictionaries(WORDS, WORDS | st.booleans() | st.lists(st.none()), max_size=2),
    "maybe": st.none() | st.integers(),
    "unit": st.sampled_from(["C", "F", 5]),
}
CALLS: st.SearchStrategy[list[Call]] = st.lists(
    st.tuples(st.sampled_from(["alpha", "get-beta.2"]), st.fixed_dictionaries({}, optional=VALUES)),
    min_size=1,
    max_size=3,
)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=20)
PROSE = st.text(alphabet="abc .,!\n1", max_size=9)


@given(st.sampled_from(list(FAMILIES)), CALLS, PROSE, PROSE, SIZES)
def test_calls_are_found_and_the_text_around_them_stays(
    family: str, calls: list[Call], before: str, after: str, sizes: list[int]
) -> None:
    name, write = FAMILIES[family]
    if name in ("llama3", "pythonic"):
        before = ""  # calls only at the beginning
    if name == "llama3":
        after = after.lstrip(" \n,")  # a separator
    text = before + write(calls) + after
    parts, is_in_call = read(name, cut(text, sizes))
    assert parts == read(name, [text])[0]
    assert calls_of(parts) == calls
    if not after.strip():
        before, after = before.rstrip(), ""
    assert parts.content == (before + after if before.strip() else after.lstrip())
    assert not is_in_call


@given(st.sampled_from(list(FAMILIES)), CALLS, st.integers(0, 400), SIZES)
def test_a_call_that_is_cut_off_is_as_much_as_was_written(
    family: str, calls: list[Call], length: int, sizes: list[int]
) -> None:
    name, write = FAMILIES[family]
    text = write(calls)[:length]
    parts, is_in_call = read(name, cut(text, sizes), is_cut=True)
    assert parts == read(name, [text], is_cut=True)[0]
    if not parts.calls:
        assert parts.content == text
    elif not is_in_call:
        found = calls_of(parts)
        assert found == calls[: len(found)]


REFUSED = {
    "hermes": "<tool_call>\n{0}\n</tool_call>",
    "llama3": "{0}",
    "mistral": "[TOOL_CALLS] [{0}]",
    "pythonic": "{0}",
    "qwen3_coder": "<tool_call>\n{0}\n</tool_call>",
}
NO_CALLS = [
    '{"name": "Alice", "age": 30}',
    '{"name": "alpha", "arguments": [1]}',
    '{"name": "alpha", "arguments": "no object"}',
    '{"name": 5, "arguments": {}}',
    '{"arguments": {"a": "<tool_call>{\\"name\\": \\"now\\", \\"arguments\\": {}}</tool_call>"}}',
    '{"name": "Alice", "parameters": {"a": "[TOOL_CALLS]now{}", "b": [{"name": "now"}]}}',
    '[{"name": "Alice"}, {"name": "now"}]',
    '{"answer": {"name": "now", "arguments": {}}}',
    "Alice(age=30)",
    "[Alice(age=30)]",
    "[alpha(30)]",
    "[alpha(x=now())]",
    "[]",
    "<function=Alice>\n<parameter=age>\n<function=now>\n</parameter>\n</function>",
    "<function=Alice",
    "Alice[ARGS]{}",
    "Alice{} and more",
    '{"name": ',
]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_of_an_offered_function_stays_text(name: str, text: str) -> None:
    text = f"{REFUSED[name].replace('{0}', text)}\n"
    for size in (1, 2, 5, 1000):
        parts, _ = read(name, cut(text, [size]))
        assert parts == Parts(content=text)


FAULTY: list[tuple[str, str, list[Call]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "alpha", "arguments": {"a": {"b": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [("alpha", {"a": {"b": 1}}), ("now", {})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "alpha", "arguments": {"a": [1, 2}}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {"x": 1</tool_call>',
        [("alpha", {"a": [1, 2]}), ("now", {"x": 1})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "alpha", "arguments": {"a": 1,}}}</tool_call>',
        [("alpha", {"a": 1})],
    ),
    (
        "llama3",
        '{"name": "alpha", "parameters": {"a": 1}; {"name": "now", "parameters": {}}}',
        [("alpha", {"a": 1}), ("now", {})],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "alpha", "arguments": {"a": 1}, {"name": "now", "arguments": {}}]',
        [("alpha", {"a": 1}), ("now", {})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=alpha>\n<parameter=text>\na\nb\n<parameter=count>\n5\n</parameter>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</tool_call>",
        [("alpha", {"text": "a\nb", "count": 5}), ("now", {})],
    ),
    *[
        (
            name,
            text.replace("VALUE", '"a\nb\r\t\x01\\d \\"q\\" \\u00e9 \\\' \\u12"'),
            [("alpha", {"text": "a\nb\r\t\x01\\d \"q\" é ' \\u12"})],
        )
        for name, text in (
            ("hermes", '<tool_call>{"name": "alpha", "arguments": {"text": VALUE}}</tool_call>'),
            ("llama3", '{"name": "alpha", "parameters": {"text": VALUE}}'),
            ("mistral", '[TOOL_CALLS]alpha[ARGS]{"text": VALUE}'),
            ("pythonic", "[alpha(text=VALUE)]"),
        )
    ],
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": True, "y": [None]}}</tool_call>',
     [("now", {"x": True, "y": [None]})]),
    ("pythonic", "[alpha(flag=true, other=null, deep=[{'a': (1, false)}], from=-1.5)]",
     [("alpha", {"flag": True, "other": None, "deep": [{"a": [1, False]}], "from": -1.5})]),
    ("pythonic", "[now(a='''x, \"y\" (\n''', b=\"it's)\",), now()]",
     [("now", {"a": 'x, "y" (\n', "b": "it's)"}), ("now", {})]),
    ("qwen3_coder", "<tool_call>\n<function=alpha>\n<parameter=flag>\nTrue\n</parameter>\n"
     "<parameter=place>\n{'a': None}\n</parameter>\n<parameter=maybe>\nNone\n</parameter>\n"
     "<parameter=other>\n12\n</parameter>\n</function>\n</tool_call>",
     [("alpha", {"flag": True, "place": {"a": None}, "maybe": None, "other": "12"})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls"), FAULTY)
def test_faulty_calls_are_taken_as_they_were_meant(name: str, text: str, calls: list[Call]) -> None:
    for size in (1, 2, 7, 1000):
        parts, is_in_call = read(name, cut(text, [size]))
        assert (calls_of(parts), parts.content, is_in_call) == (calls, "", False)


@pytest.mark.parametrize(
    ("text", "call_id"),
    [
        ('[TOOL_CALLS]alpha[CALL_ID]abc123def[ARGS]{"g": 1}', "abc123def"),
        ('[TOOL_CALLS] alpha [CALL_ID] abc123def [ARGS] {"g": 1}', "abc123def"),
        ('[TOOL_CALLS][{"id": "abc123def", "name": "alpha", "arguments": {"g": 1}}]', "abc123def"),
        ('[TOOL_CALLS][{"arguments": {"g": 1}, "id": "abc123def", "name": "alpha"}]', "abc123def"),
        ('[TOOL_CALLS][{"name": "alpha", "arguments": {"g": 1}, "id": "abc123def"}]', None),
        ('[TOOL_CALLS][{"id": 5, "name": "alpha", "arguments": {"g": 1}}]', None),
    ],
)
def test_an_id_that_a_model_writes_before_a_call_is_streamed_is_its_own(
    text: str, call_id: str | None
) -> None:
    for size in (1, 3, 1000):
        (piece,) = read("mistral", cut(text, [size]))[0].calls
        assert piece == CallPiece(0, "alpha", '{"g": 1}', call_id)


@pytest.mark.parametrize("unit", matrix(["a", "1", "-", '\\"', "'", "\\"], 2))
def test_what_a_model_repeats_without_end_is_read_in_one_pass(unit: str) -> None:
    """It holds the event loop; read anew from each character, this would take minutes."""
    wanders = unit * 40_000
    for name, text in (
        ("pythonic", f"[{wanders}"),
        ("pythonic", f"[alpha(text={wanders})]"),
        ("qwen3_coder", f'<function=alpha>\n<parameter=items>\n["{wanders}'),
        ("qwen3_coder", f'<function=alpha>\n<parameter=items>\n["{wanders}\n</parameter>\n'),
    ):
        parts, _ = read(name, cut(text, [4096]))
        assert parts.content + "".join(piece.arguments for piece in parts.calls)


def test_long_strings_are_passed_on_as_they_come() -> None:
    for name, begin in (
        ("qwen3_coder", "<tool_call>\n<function=alpha>\n<parameter=text>\n"),
        ("hermes", '<tool_call>{"name": "alpha", "arguments": {"text": "'),
    ):
        parser = ToolFormat(name).parser(TOOLS)
        parser.push(begin)
        told = parser.push("word " * 100).calls[0].arguments
        assert told.count("word") > 90


def test_a_schema_that_refers_to_itself_is_followed_once() -> None:
    twice = {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}, {"type": "integer"}]}
    schema = {"properties": {"n": {"$ref": "#/$defs/x"}}, "$defs": {"x": twice}}
    text = "<function=alpha>\n<parameter=n>\n5\n</parameter>\n</function>"
    assert calls_of(read("qwen3_coder", [text], {"alpha": schema})[0]) == [("alpha", {"n": 5})]
