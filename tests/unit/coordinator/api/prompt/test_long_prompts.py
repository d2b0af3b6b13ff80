"""Prompts far beyond the context are refused for the work of a prompt within it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.api.prompt.parameter import PromptParameter
from pdserve.shared.errors import ContextLengthExceeded
from tests.fakes.generator import FakeGenerator
from tests.fakes.tokenizer import FakeTokenizer
from tests.unit.coordinator.api.harness import served

CONTEXT = 512
WORDS = "The quick brown fox jumps over the lazy dog, naïve café 你好世界 😀. "
FAR_BEYOND = (WORDS * 20_000)[:652_000]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": FAR_BEYOND}),
        ("completions", {"prompt": ["Hi", FAR_BEYOND]}),
        ("chat/completions", {"messages": [{"role": "user", "content": FAR_BEYOND}]}),
        ("embeddings", {"input": FAR_BEYOND}),
        ("responses", {"input": FAR_BEYOND}),
    ],
)
async def test_a_text_far_beyond_the_context_is_not_tokenised(
    path: str, body: dict[str, Any]
) -> None:
    tokenised: list[int] = []
    ours = FakeTokenizer(tokenised.append, max_chars_per_token=2**20)  # a token may be that long
    async with served(FakeGenerator(max_model_len=CONTEXT), ours) as api:
        raw = io.BytesIO(json.dumps({"model": "alias", **body}).encode())
        kind = {"Content-Type": "application/json"}
        async with api.client.post(f"/v1/{path}", data=raw, headers=kind) as response:
            error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "context_length_exceeded")
    assert "of the prompt's" in error["message"]
    assert sum(tokenised) < 20 * CONTEXT


def test_what_fits_is_tokenised_as_ever() -> None:
    tokenised: list[int] = []
    ours = FakeTokenizer(tokenised.append)
    for text in ("", "x", WORDS * 9, " " * 40_000, "a" * 100_000):
        expected = ours.encode(text, add_special_tokens=True)
        for limit in (len(expected), len(expected) + 1):
            found = ours.encode_fitting(text, add_special_tokens=True, max_tokens=max(1, limit))
            assert found == expected
    tokenised.clear()
    ours.encode_fitting(WORDS * 9, add_special_tokens=True, max_tokens=CONTEXT)
    assert tokenised == [len(WORDS * 9)], "in one piece"


async def test_a_text_to_be_truncated_may_be_longer() -> None:
    async with (
        served(FakeGenerator(max_model_len=CONTEXT)) as api,
        api.complete(prompt=WORDS * 500, truncate_prompt_tokens=-1) as response,
    ):
        assert response.status == 200
        usage = (await response.json())["usage"]
    assert usage["prompt_tokens"] == CONTEXT - 1


def test_lists_of_ids_are_measured_before_they_are_looked_at() -> None:
    class Unseen(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("scanned")

    parameter = PromptParameter("prompt", max_prompts=64)
    for prompt in (Unseen([1] * 1000), [[1], Unseen([1] * 1000)]):
        with pytest.raises(ContextLengthExceeded, match="1000"):
            parameter.split(prompt, CONTEXT)
