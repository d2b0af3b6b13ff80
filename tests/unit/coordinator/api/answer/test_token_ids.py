"""Tokens in and out of an answer by their ids, as vLLM's users ask for them."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.api.answer.arrivals import PIECE
from pdserve.protocol import FinishReason
from tests.fakes.generator import EOS, FakeGenerator, Pause, Tokens, says, tiny_tokenizer
from tests.unit.coordinator.api.harness import events_of, is_error_body, served

TEXT = "a🦊 b"
IDS = [*tiny_tokenizer().encode(TEXT, add_special_tokens=False), EOS]


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_ids_are_told_beside_the_text(kind: str) -> None:
    async with served(FakeGenerator(says(TEXT))) as api:
        async with getattr(api, kind)(return_token_ids=True) as response:
            answer = await response.json()
        async with getattr(api, kind)() as response:
            assert "token_ids" not in await response.text()
    prompt_ids = api.generator.last.request.prompt.token_ids
    assert answer["choices"][0]["token_ids"] == IDS, "the last one is not shown, and told"
    told = answer if kind == "chat" else answer["choices"][0]
    assert told["prompt_token_ids"] == prompt_ids


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_ids_are_streamed_with_the_text(kind: str) -> None:
    generator = FakeGenerator(says(TEXT, pause_s=0.001))
    async with (
        served(generator) as api,
        getattr(api, kind)(return_token_ids=True, stream=True, n=2) as response,
    ):
        chunks = events_of(await response.read())[:-1]
    for index in range(2):
        choices = [(c, c["choices"][0]) for c in chunks if c["choices"][0]["index"] == index]
        assert [i for _, choice in choices for i in choice.get("token_ids", [])] == IDS
        told = [chunk if kind == "chat" else choice for chunk, choice in choices]
        prompts = [one["prompt_token_ids"] for one in told if "prompt_token_ids" in one]
        assert prompts == [generator.last.request.prompt.token_ids], "once, and first of all"
        assert "prompt_token_ids" in told[0]


async def test_ids_take_the_place_of_texts_in_log_probabilities() -> None:
    async with served(FakeGenerator(says(TEXT))) as api:
        names: Any = {"return_tokens_as_token_ids": True}
        async with api.chat(logprobs=True, top_logprobs=1, **names) as response:
            tokens = (await response.json())["choices"][0]["logprobs"]["content"]
        async with api.complete(logprobs=1, prompt_logprobs=0, **names) as response:
            choice = (await response.json())["choices"][0]
    shown = choice["logprobs"]
    (last,) = choice["prompt_logprobs"][-1].values()
    assert last["decoded_token"] == "there"[-len(last["decoded_token"]) :], "it has its id besides"
    names = [f"token_id:{i}" for i in IDS[:-1]]
    assert [token["token"] for token in tokens] == names
    assert [token["top_logprobs"][0]["token"] for token in tokens] == names
    assert bytes(b for token in tokens for b in token["bytes"]).decode() == TEXT
    assert shown["tokens"] == names
    assert [list(top) for top in shown["top_logprobs"]] == [[name] for name in names]


@pytest.mark.parametrize(
    ("kept", "max_tokens", "num_left"),
    [(3, 5, 3), (600, 5, None), (-1, 5, 507), (-1, 500, 12), (600, None, None)],
)
async def test_prompts_are_truncated_from_the_left(
    kept: int, max_tokens: int | None, num_left: int | None
) -> None:
    prompt = "".join(chr(ord("A") + i % 26) for i in range(600))
    prompt_ids = tiny_tokenizer().encode(prompt, add_special_tokens=True)
    assert len(prompt_ids) > 512, "there is no room for all of it"
    async with served() as api:
        body = {"prompt": prompt, "truncate_prompt_tokens": kept, "max_tokens": max_tokens}
        async with api.complete(**body) as response:
            if num_left is None:
                answer = await response.json()
                assert is_error_body(answer)
                assert answer["error"]["code"] == "context_length_exceeded"
                return
            assert response.status == 200
    assert api.generator.last.request.prompt.token_ids == prompt_ids[-num_left:]


async def test_prompts_are_truncated_from_the_right_if_asked() -> None:
    kept: dict[str, Any] = {"truncate_prompt_tokens": 2, "truncation_side": "right"}
    async with served() as api, api.complete(prompt=[5, 6, 7], **kept) as response:
        assert response.status == 200
    assert api.generator.last.request.prompt.token_ids == [5, 6]


async def test_chats_and_inputs_are_truncated_too() -> None:
    inputs = ["x " * 600, "y"]
    async with (
        served(FakeGenerator(lambda _: [Tokens([])])) as api,
        api.embed(input=inputs, truncate_prompt_tokens=-1) as response,
    ):
        assert response.status == 200
    assert [len(g.request.prompt.token_ids) == 512 for g in api.generator.generations] == [
        True,
        False,
    ]
    async with served() as api:
        async with api.chat(truncate_prompt_tokens=2) as response:
            assert (await response.json())["usage"]["prompt_tokens"] == 2
        async with api.chat(truncate_prompt_tokens=0) as response:
            assert (await response.json())["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_a_long_answer_tells_all_its_ids(kind: str) -> None:
    """It is put together of several pieces, each of which has ids of its own."""
    ids = (IDS[:-1] * PIECE)[: PIECE + 9]
    parts = [Tokens(ids[:-9]), Pause(0.01), Tokens(ids[-9:], FinishReason.LENGTH)]
    generator = FakeGenerator(lambda _: parts, max_model_len=4096)
    async with (
        served(generator) as api,
        getattr(api, kind)(return_token_ids=True, max_tokens=len(ids)) as response,
    ):
        (choice,) = (await response.json())["choices"]
    assert choice["token_ids"] == ids
