"""What is told of a call's input: always the beginning of an object, whatever the model writes."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from coordinator.api.messages.tool_input import ToolInput

jiter: Any = pytest.importorskip("jiter", reason="clients of the Messages API parse with it")
GOOD = (
    '{"a": [1, -2.5e3, {"b": "x\\n\\"\\u00e9\\ud83d\\ude00"}, []], "c": {}, "d": true, "e": null}'
)
BROKEN = [
    "{bad: 1}",
    "{'a': 1}",
    '{"a": 1, b: 2}',
    '{"a": [1, {"b": x}], "c": 1}',
    '{"a": {"b": "x\\q"}}',
    '{"a": "\\ud83dx"}',
    '{"a": "\\ude00"}',
    '{"a": 01}',
    '{"a": {"b": 1,}}',
    '{"a": [1,]}',
    '{"a" 1}',
    '{"a": "x\ny"}',
    "[1]",
    "x",
]


def told(text: str, random: Random | None = None, *, is_cut: bool = False) -> list[str]:
    """What is told, piece by piece; by character, or cut at random places."""
    given, pieces, at = ToolInput(), [], 0
    while at < len(text):
        end = at + 1 if random is None else random.randint(at + 1, len(text))
        pieces.append(given.push(text[at:end]))
        at = end
    return [*pieces, given.finish(is_cut=is_cut)]


def test_an_object_is_told_as_it_is_and_as_far_as_it_goes() -> None:
    assert "".join(told(GOOD)) == GOOD
    for end in range(len(GOOD)):
        assert GOOD.startswith("".join(told(GOOD[:end], is_cut=True)))
    assert "".join(told('{"a": "the begi', is_cut=True)) == '{"a": "the begi'


def test_a_call_that_ended_too_early_is_an_object_all_the_same() -> None:
    for end in range(1, len(GOOD)):
        found = json.loads("".join(told(GOOD[:end])))
        assert "arguments" not in found
    assert json.loads("".join(told('{"a": ["the end of the line'))) == {
        "a": ["the end of the line"]
    }


def test_a_number_without_end_is_not_looked_at_for_ever() -> None:
    number, given = "1" * 5000, ToolInput()
    assert given.push('{"a": ') == '{"a": '
    assert not any(given.push(number[at : at + 5]) for at in range(0, len(number), 5))
    end = given.finish(is_cut=False)
    assert json.loads('{"a": ' + end) == {"a": None, "arguments": '{"a": ' + number}


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_json_is_told_whole_at_the_end(text: str) -> None:
    pieces = told(text)
    found = json.loads("".join(pieces))
    assert found["arguments"] == text
    for random in map(Random, range(20)):
        assert json.loads("".join(told(text, random))) == found
    for number in range(1, 1 + len(pieces)):
        if before := "".join(pieces[:number]):
            jiter.from_json(before.encode(), partial_mode=True)


def test_however_an_object_is_damaged_clients_can_read_it() -> None:
    random = Random(0)
    for _ in range(400):
        at, end = random.randint(0, len(GOOD)), random.randint(0, len(GOOD))
        text = "{" + GOOD[min(at, end) : max(at, end)] + random.choice(["", "}", "x}", ","]) + "}"
        so_far = ""
        for piece in told(text, random):
            so_far += piece
            if so_far:
                assert isinstance(jiter.from_json(so_far.encode(), partial_mode=True), dict)
