"""Answers that clients predict, and what usage says of tokens that were guessed."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.protocol import FinishReason
from tests.fakes.generator import EOS, FakeGenerator, Tokens, says, tiny_tokenizer
from tests.unit.coordinator.api.harness import events_of, served


def guessed(text: str) -> list[Tokens]:
    """Said in two steps: the first is guessed but for a token, of the second nothing."""
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    return [
        Tokens(ids[:1]),
        Tokens(ids[1:-1], accepted=len(ids) - 3, refused=2),
        Tokens([ids[-1]], refused=5),
        Tokens([EOS], FinishReason.STOP, EOS),
    ]


@pytest.mark.parametrize(
    "content",
    ["Hello world", [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]],
)
async def test_nodes_are_told_what_is_expected(content: Any) -> None:
    expected = {"type": "content", "content": content}
    async with (
        served(FakeGenerator(says("Hello"))) as api,
        api.chat(prediction=expected, n=2) as response,
    ):
        usage = (await response.json())["usage"]["completion_tokens_details"]
    ids = tiny_tokenizer().encode("Hello world", add_special_tokens=False)
    assert [list(g.request.prediction) for g in api.generator.generations] == [ids, ids]
    assert (usage["accepted_prediction_tokens"], usage["rejected_prediction_tokens"]) == (0, 0)


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("Hello", "prediction"),
        ({"type": "file", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image"}]}, "prediction.content"),
        ({"type": "content", "content": "x y " * 9000}, "prediction"),
    ],
)
async def test_what_cannot_be_one_is_refused(prediction: Any, param: str) -> None:
    async with served() as api, api.chat(prediction=prediction) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_usage_tells_guesses_that_were_right_from_others(kind: str, stream: bool) -> None:
    script = guessed("Hello wide world")
    body = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with (
        served(FakeGenerator(lambda _: script)) as api,
        getattr(api, kind)(**body) as response,
    ):
        if stream:
            usage = events_of(await response.read())[-2]["usage"]
        else:
            usage = (await response.json())["usage"]
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == script[1].accepted > 3
    assert details["rejected_prediction_tokens"] == 7
    assert usage["completion_tokens"] == sum(len(step.ids) for step in script)


async def test_guesses_behind_a_stop_string_are_no_part_of_the_answer() -> None:
    script = guessed("Hello wide world")
    async with (
        served(FakeGenerator(lambda _: script)) as api,
        api.chat(stop="wi") as response,
    ):
        usage = (await response.json())["usage"]
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert accepted == usage["completion_tokens"] - 2


async def test_without_guesses_usage_has_no_word_of_them() -> None:
    async with served(FakeGenerator(says("Hello"))) as api, api.chat() as response:
        usage = (await response.json())["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
