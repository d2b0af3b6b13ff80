"""The channels of gpt-oss, told apart however answers are cut."""

from __future__ import annotations

import pytest

from coordinator.text.parts import AnswerParts
from coordinator.text.parts.harmony import FinalStart, Harmony
from tests.unit.coordinator.text.test_parts import OFFERED, A, Call, read, read_any_way

THOUGHT = "<|channel|>analysis<|message|>Which < one?<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Paris.<|return|>"


def called(name: str, arguments: str, header: str = "commentary to={} <|constrain|>json") -> str:
    return f"<|start|>assistant<|channel|>{header.format(name)}<|message|>{arguments}<|call|>"


NOW = called("functions.now", "")
CASES: list[tuple[str, str, str, list[Call]]] = [
    (THOUGHT + FINAL, "Which < one?", "Paris.", []),
    (FINAL, "", "Paris.", []),
    ("Paris.", "", "Paris.", []),
    ("a < b to=c <|chan", "", "a < b to=c <|chan", []),
    ("<|channel|>analysis<|message|>cut of", "cut of", "", []),
    ("<|channel|>analysis<|message|>cut of<|e", "cut of<|e", "", []),
    ("<|channel|>final <|constrain|>JSON<|message|>{}", "", "{}", []),
    (THOUGHT + "<|start|>assistant<|channel|>comm", "Which < one?", "", []),
    (THOUGHT + NOW, "Which < one?", "", [("now", {})]),
    (
        THOUGHT + "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>" + NOW,
        "Which < one?",
        "I look.",
        [("now", {})],
    ),
    (
        called("functions.f", '{"x": "<|"}')[len("<|start|>assistant") :],
        "",
        "",
        [("f", {"x": "<|"})],
    ),
    (
        " to=functions.f<|channel|>commentary json<|message|> {}<|call|>" + NOW,
        "",
        "",
        [("f", {}), ("now", {})],
    ),
    (called("functions.unknown", "{}"), "", "{}", []),
    (called("python", "print(1)", "analysis to={} code"), "print(1)", "", []),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_channels_are_told_apart(
    text: str, reasoning: str, content: str, calls: list[Call]
) -> None:
    assert read_any_way(lambda: Harmony(OFFERED), text) == (reasoning, content, calls)


def test_reasoning_may_be_content_or_nothing_or_whole() -> None:
    text = THOUGHT + FINAL
    assert read(Harmony(OFFERED, is_apart=False), list(text)) == ("", "Which < one?Paris.", [])
    assert read(Harmony(OFFERED, is_shown=False), list(text)) == ("", "Paris.", [])
    whole = Harmony(OFFERED, is_streamed=False)
    thoughts = [part.reasoning for char in text if (part := whole.push(char)).reasoning]
    assert thoughts == ["Which < one?"]


def test_an_answer_that_goes_on_in_its_content() -> None:
    parser = Harmony(OFFERED, has_begun=True)
    assert read(parser, ["Par", "is.<|return|>"]) == ("", "Paris.", [])


def test_calls_are_counted_and_limited() -> None:
    parts = AnswerParts(max_calls=1, must_call=True, channels=Harmony(OFFERED))
    text = THOUGHT + called("functions.weather", '{"city": "Paris"}') + NOW + "more"
    assert read(parts, list(text)) == ("Which < one?", "", [(A[0], {"city": "Paris"})])
    assert parts.num_calls == 1
    assert not parts.is_in_call


def test_what_is_known_of_an_answer_on_the_way() -> None:
    parts = AnswerParts(channels=Harmony(OFFERED))
    assert parts.may_reason
    parts.push("<|channel|>analysis<|message|>Well")
    assert parts.is_reasoning
    parts.push("<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{")
    assert (parts.is_reasoning, parts.is_in_call, parts.may_reason) == (False, True, True)
    parts.push("}<|end|><|start|>assistant<|channel|>final<|message|>So")
    assert not parts.may_reason


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        (THOUGHT + FINAL, "Paris.<|return|>"),
        ("Paris.", "Paris."),
        (" to", " to"),
        (THOUGHT + NOW, ""),
    ],
)
def test_stop_strings_count_from_the_content_on(text: str, content: str, size: int) -> None:
    start, before, found = FinalStart(), "", ""
    for i in range(0, len(text), size):
        skipped, known = start.push(text[i : i + size])
        before, found = before + skipped, found + known
    held = start.finish()
    assert before + found + held == text
    assert found in (content, "")
    assert content in (found, held)


def test_what_precedes_the_content_is_not_held_back() -> None:
    assert FinalStart().push("<|channel|>analysis<|message|>Well")[0].endswith("Well")
