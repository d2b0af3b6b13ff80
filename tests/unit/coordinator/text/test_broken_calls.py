"""Calls whose arguments are no JSON, or that do not end: each is a call, and nothing but itself."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.parts import ToolFormat
from tests.matrix import matrix
from tests.unit.coordinator.text.test_calls import SIZES, TOOLS, Call, calls_of, cut, read

BROKEN = [
    '{"a": 1 "b": [1 2]}',
    "{a: 1, b_c: {d: 2}}",
    '{"a": 01, "b": +1, "c": .5, "d": 0x1F, "e": 1_000}',
    '{"a": NaN, "b": -Infinity, "c": undefined}',
    '{"a": 1, // it\'s "x, } and </b>; more\n "b": 2}',
    '{"a": /* it\'s " ] } */ 1, "b": 2 # don\'t }\n}',
    "{'a': 'x', 'b': ['y \"z', '{', 'it\\'s'], 'c': True}",
    "{'a': 'it's {fine', 'b': 'the dogs' bowl }'}",
    '{"a": `b "}" </tool_call> [TOOL_CALLS]`, "c": 1}',
    '{"a": """b "c} </tool_call>\n d""", "e": 1}',
    "{'a': '''b 'c} \" d''', 'e': 1}",
    '{"a" 1, "b": = 2, "c";}'.replace(";", ""),
    '{"a": (1, 2), "b": 5%, "c": @x}',
    '{"a": it\'s, "b": 2}',
]
NOW = '{"name": "now", "arguments": {}}'
MARKED = f"<tool_call>\n{NOW}\n</tool_call>"
WAYS = {
    "hermes": ('<tool_call>\n{"name": "alpha", "arguments": BROKEN}\n</tool_call>\n', MARKED),
    "hermes late name": ('<tool_call>{"arguments": BROKEN, "name": "alpha"}</tool_call>', MARKED),
    "hermes in python": ("<tool_call>{'name': 'alpha', 'arguments': BROKEN}</tool_call>", MARKED),
    "hermes bare": ("<tool_call>{name: alpha, arguments: BROKEN,}</tool_call>", MARKED),
    "llama3": ('{"name": "alpha", "parameters": BROKEN}; ', NOW),
    "mistral list": ('[TOOL_CALLS][{"name": "alpha", "arguments": BROKEN}, ', f"{NOW}]"),
    "mistral": ("[TOOL_CALLS]alpha[ARGS]BROKEN", "[TOOL_CALLS]now[ARGS]{}"),
}


def check(way: str, broken: str, sizes: list[int]) -> None:
    first, second = WAYS[way]
    text = first.replace("BROKEN", broken) + second
    parts, is_in_call = read(way.split()[0], cut(text, sizes))
    told = ["".join(c.arguments for c in parts.calls if c.index == i) for i in (0, 1)]
    assert told == [broken, "{}"], text
    assert [c.name for c in parts.calls if c.name] == ["alpha", "now"]
    assert (parts.content, is_in_call) == ("", False)


@pytest.mark.parametrize("way", WAYS)
def test_broken_arguments_are_passed_on_as_they_are(way: str) -> None:
    for broken in BROKEN:
        for size in (1, 7, 1000):
            check(way, broken, [size])


def broken_objects() -> st.SearchStrategy[str]:
    scalars = st.sampled_from(
        ["01", "NaN", '"a }"', "'b }'", "'it's ]'", "`c }`", '"""d "e" }"""', "[1 2]", "x", "-"]
    )
    values = st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3).map(lambda v: f"[{', '.join(v)}]")
            | st.dictionaries(KEYS, inner, max_size=3).map(lambda v: as_object(v, ", "))
        ),
        max_leaves=5,
    )
    between = st.sampled_from([", ", ",\n", " ,", " // it's } \"x\n, ", " /* ' } */, "])
    members = st.dictionaries(KEYS, values, max_size=4)
    # From the comment on, all is as it was written.
    return st.builds(lambda v, b: "{/**/" + as_object(v, b)[1:], members, between)


KEYS = st.sampled_from(['"k"', "'l'", "m", '"n o"', "'p}'"])


def as_object(members: dict[str, str], between: str) -> str:
    return "{" + between.join(f"{key}: {value}" for key, value in members.items()) + "}"


@given(st.sampled_from(list(WAYS)), broken_objects(), SIZES)
def test_brackets_and_marks_in_them_mean_nothing(way: str, broken: str, sizes: list[int]) -> None:
    check(way, broken, sizes)


def test_arguments_as_text_that_is_no_json_are_passed_on() -> None:
    for broken in BROKEN:
        said = json.dumps({"name": "alpha", "arguments": broken})
        (piece,) = read("hermes", [f"<tool_call>{said}</tool_call>"])[0].calls
        assert piece.arguments == broken


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("01", "01"),
        ("NaN", "NaN"),
        ("-inf", "-inf"),
        ("{'a': 1 'b': 2}", "{'a': 1 'b': 2}"),
        ("{a: 1}", "{a: 1}"),
        ("[1, /* it's ] */ 2]", "[1, /* it's ] */ 2]"),
        ("[1, # it's ]\n 2,]", "[1, 2]"),
        ("5 # ), it's", "5"),
        ("'it's'", None),
        ("undefined", "undefined"),
        ("x", None),
        ("[now()]", None),
        ("{'a': '(now()'}", '{"a": "(now()"}'),
    ],
)
def test_values_of_pythonic_calls(value: str, told: str | None) -> None:
    text = f"[alpha(a={value}\n, b=2), now()]"
    for size in (1, 3, 1000):
        parts, _ = read("pythonic", cut(text, [size]))
        if told is None:
            assert parts.content == text
        else:
            assert [c.arguments for c in parts.calls] == [f'{{"a": {told}, "b": 2}}', "{}"]


CODER = "<tool_call>\n<function=alpha>\n<parameter=text>\nVALUE\n"
NEXT = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
FUNCTION, CALL = "</function>\n", "</function>\n</tool_call>\n"
ALPHA, BOTH = ("alpha", {"text": "VALUE"}), [("alpha", {"text": "VALUE"}), ("now", {})]
ALICE = CODER.replace("alpha", "Alice") + CALL
LISTS = CODER.replace("text", "items").replace("VALUE", "[1, 2]")
UNENDED: list[tuple[str, list[Call], str]] = [
    # text, calls, content
    (CODER + CALL, [ALPHA], ""),
    (CODER + CALL + "Done.", [ALPHA], "Done."),
    (CODER + FUNCTION, [ALPHA], ""),
    (CODER + "</tool_call>", [ALPHA], ""),
    (CODER.rstrip() + CALL, [ALPHA], ""),
    (CODER + CALL + NEXT, BOTH, ""),
    (CODER + "</tool_call>" + NEXT, BOTH, ""),
    (CODER + FUNCTION + NEXT, BOTH, ""),
    (CODER + FUNCTION + "So: " + NEXT, BOTH, "So:"),
    (3 * (CODER + CALL), 3 * [ALPHA], ""),
    (LISTS + CALL + NEXT, [("alpha", {"items": [1, 2]}), ("now", {})], ""),
    (
        f"{CODER}{CALL}is an end\n</parameter>\n{CALL}",
        [("alpha", {"text": f"VALUE\n{CALL}is an end"})],
        "",
    ),
    (ALICE + NEXT, [("now", {})], ALICE.rstrip()),
]


@pytest.mark.parametrize(("text", "calls", "content"), UNENDED)
def test_a_value_without_its_end_ends_where_its_function_does(
    text: str, calls: list[Call], content: str
) -> None:
    for size in (1, 2, 9, 1000):
        parts, is_in_call = read("qwen3_coder", cut(text, [size]))
        assert (calls_of(parts), parts.content, is_in_call) == (calls, content, False)


BEGUN = '{"name": "alpha", "arguments": {"city": '


@pytest.mark.parametrize(
    ("name", "text", "after"),
    [
        ("hermes", f'<tool_call>\n{BEGUN}"Paris}}\n', "</tool_call>\n"),
        ("hermes", "<tool_call>" + (BEGUN + '"Paris}').replace('"', "'"), "</tool_call>"),
        ("hermes", f"<tool_call>{BEGUN}1 // Paris}}", "</tool_call>"),
        ("mistral", '[TOOL_CALLS]alpha[ARGS]{"city": "Paris}', ""),
    ],
)
def test_a_string_without_its_end_swallows_no_neighbours(name: str, text: str, after: str) -> None:
    follows = {"hermes": MARKED, "mistral": "[TOOL_CALLS]now[ARGS]{}"}
    whole = text + after + follows[name]
    for size in (1, 2, 9, 1000):
        parts, _ = read(name, cut(whole, [size]))
        assert [c.name for c in parts.calls if c.name] == ["alpha", "now"]
        said = "".join(c.arguments for c in parts.calls if c.index == 0)
        assert text.replace("\n", "\\n").endswith(said)
        assert parts.content == ""
    refused = whole.replace("alpha", "Alice")
    for size in (1, 9, 1000):
        parts, _ = read(name, cut(refused, [size]))
        assert [c.name for c in parts.calls] == ["now"]
        assert parts.content == refused.removesuffix(follows[name]).rstrip()


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_what_a_limit_cuts_off_is_not_ended(name: str) -> None:
    """It may as well go on with the value."""
    begin = (
        CODER if name == "qwen3_coder" else '<tool_call>{"name": "alpha", "arguments": {"text": "'
    )
    parser = ToolFormat(name).parser(TOOLS)
    parts = parser.push(begin + "</function>\n</tool_call> is")
    parts += parser.finish(is_cut=True)
    assert parser.is_in_call
    assert "".join(piece.arguments for piece in parts.calls).endswith("</tool_call> is")
    parser = ToolFormat.QWEN3_CODER.parser(TOOLS)
    parts = parser.push(CODER.replace("text", "count").replace("VALUE\n", "12</para"))
    parts += parser.finish(is_cut=True)
    assert "".join(piece.arguments for piece in parts.calls) == '{"count": 12'


@pytest.mark.parametrize("name", matrix(["alpha", "Alice"], 1))
def test_what_is_held_back_is_read_in_one_pass(name: str) -> None:
    """It holds the event loop; read anew at each character, this would take minutes."""
    for way, begin in (("hermes", '<tool_call>{"name": "alpha", "arguments": {"text": "'),
                       ("qwen3_coder", CODER + "</function>")):  # fmt: skip
        text = f"{begin.replace('alpha', name)}</tool_call>{'a' * 100_000}"
        parts, _ = read(way, cut(text, [4]))
        assert parts.content.endswith("a")
