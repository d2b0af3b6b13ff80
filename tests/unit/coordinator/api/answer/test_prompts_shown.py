"""POST /v1/completions: `echo`, `prompt_logprobs`, and prompts that are all there is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from coordinator.generation import GenerationRequest
from tests.fakes.generator import FakeGenerator, Step, says, tiny_tokenizer
from tests.unit.coordinator.api.harness import events_of, served

PROMPT = "Say STOP, über"


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=True)


async def choices_of(generator: FakeGenerator | None = None, **body: Any) -> list[Any]:
    async with served(generator) as api, api.complete(**body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        choices: list[Any] = answer["choices"]
        return choices


async def test_echo_alone_is_text_in_which_nothing_stops() -> None:
    (choice,) = await choices_of(prompt=PROMPT, echo=True, stop="STOP")
    assert choice["text"] == PROMPT + "Hello world"
    assert choice["logprobs"] is None
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize(
    "asked",
    [{"prompt": ids_of(PROMPT)}, {"prompt": f"<s>{PROMPT}", "add_special_tokens": False}],
)
async def test_echo_shows_special_tokens_that_the_client_has_put_there(
    asked: dict[str, Any],
) -> None:
    (choice,) = await choices_of(echo=True, **asked)
    assert choice["text"] == f"<s>{PROMPT}Hello world"


async def test_echo_with_logprobs_lists_the_prompt_first() -> None:
    (choice,) = await choices_of(prompt=PROMPT, echo=True, logprobs=2, skip_special_tokens=False)
    shown, num_prompt = choice["logprobs"], len(ids_of(PROMPT))
    assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
    assert shown["token_logprobs"][1:num_prompt] == [-float(i) for i in range(1, num_prompt)]
    assert shown["token_logprobs"][num_prompt:] == [-0.5] * (len(shown["tokens"]) - num_prompt)
    text, offsets = choice["text"], shown["text_offset"]
    assert text.endswith(PROMPT + "Hello world")
    assert text[offsets[num_prompt] :] == "Hello world"
    whole = [
        (text[begin:end], token)
        for (begin, end), token in zip(pairwise(offsets), shown["tokens"], strict=False)
        if not token.startswith("bytes:")
    ]
    assert all(piece == token for piece, token in whole), whole


async def test_streamed_echo_comes_first_and_adds_up() -> None:
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 1}
    (expected,) = await choices_of(**fields)
    generator = FakeGenerator(says("Hello world", pause_s=0.01))
    async with served(generator) as api, api.complete(stream=True, **fields) as response:
        chunks = [event["choices"][0] for event in events_of(await response.read())[:-1]]
    assert chunks[0]["text"].startswith(PROMPT)
    assert len(chunks) > 2
    assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
    for key, values in expected["logprobs"].items():
        assert [v for chunk in chunks for v in chunk["logprobs"][key]] == values


async def test_what_lm_evaluation_harness_sends() -> None:
    """It takes the last entry for the one generated token, even if that token ends the text."""
    prompt = ids_of("one two three")
    fields = {"prompt": [prompt], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    (choice,) = await choices_of(FakeGenerator(says("")), seed=1234, **fields)
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
    assert choice["logprobs"]["token_logprobs"][1:-1] == [-float(i) for i in range(1, len(prompt))]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_prompt_alone(stream: bool) -> None:
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    async with served() as api, api.complete(**fields) as response:
        assert response.status == 200
        if stream:
            (answer, _) = events_of(await response.read())
        else:
            answer = await response.json()
            assert answer["usage"]["completion_tokens"] == 0
        sent = api.generator.last.request.sampling
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids_of(PROMPT))
    assert (sent.max_tokens, sent.prompt_logprobs) == (0, 0)


async def test_prompt_logprobs_as_vllm_has_them() -> None:
    (choice,) = await choices_of(prompt=PROMPT, prompt_logprobs=2)
    prompt, shown = ids_of(PROMPT), choice["prompt_logprobs"]
    assert choice["text"] == "Hello world"
    assert choice["logprobs"] is None
    assert shown[0] is None
    assert len(shown) == len(prompt)
    entry = shown[3]
    assert entry[str(prompt[3])] == {
        "logprob": -3.0,
        "rank": 3,
        "decoded_token": tiny_tokenizer().decode([prompt[3]], skip_special_tokens=False),
    }
    assert {name: e["rank"] for name, e in entry.items() if name != str(prompt[3])} == {
        "1": 1,
        "2": 2,
    }


async def test_each_list_has_the_length_that_was_asked_for() -> None:
    (choice,) = await choices_of(prompt=PROMPT, prompt_logprobs=3, echo=True, logprobs=1)
    assert all(len(entry) == 4 for entry in choice["prompt_logprobs"][1:])
    num_prompt = len(ids_of(PROMPT))
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"][1:num_prompt])


@pytest.mark.parametrize("fields", [{"n": 2}, {"n": 2, "best_of": 3}])
async def test_several_answers_share_the_scores_of_their_prompt(fields: dict[str, int]) -> None:
    prompts, generator = ["one", "two three"], FakeGenerator()
    choices = await choices_of(
        generator, prompt=prompts, echo=True, logprobs=1, prompt_logprobs=1, **fields
    )
    for index, choice in enumerate(choices):
        prompt = prompts[index // 2]
        num_prompt = len(ids_of(prompt))
        assert choice["text"] == prompt + "Hello world"
        assert len(choice["prompt_logprobs"]) == num_prompt
        assert choice["logprobs"]["token_logprobs"][1] == -1.0
    asked = [g.request.sampling.prompt_logprobs for g in generator.generations]
    assert sorted(asked, key=str) == [1, 1] + [None] * (len(asked) - 2)


async def test_without_logprobs_prompts_are_not_scored() -> None:
    def script(request: GenerationRequest) -> Sequence[Step]:
        assert request.sampling.prompt_logprobs is None
        return says("Hello")(request)

    await choices_of(FakeGenerator(script), echo=True)
    await choices_of(FakeGenerator(script), logprobs=3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
async def test_options_that_make_no_sense_for_prompts_are_refused(
    fields: dict[str, Any], param: str
) -> None:
    async with served() as api, api.complete(**fields) as response:
        error = (await response.json())["error"]
        assert response.status == 400
        assert error["param"] == param
        assert api.generator.generations == []


@pytest.mark.long  # test_long_answers.py has the bound by default
async def test_more_than_a_message_holds_is_refused() -> None:
    generator = FakeGenerator(max_model_len=1 << 20)
    fields = {"prompt": [[5] * 60_000], "echo": True}
    async with served(generator) as api:
        async with api.complete(**fields, logprobs=20) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "logprobs"
        async with api.complete(**fields, logprobs=0) as response:
            assert response.status == 200
            shown = (await response.json())["choices"][0]["logprobs"]
    assert len(shown["tokens"]) >= 60_000


async def test_chat_has_them_too() -> None:
    """As vLLM: beside the choices, since the prompt is the same for all of them."""
    generator = FakeGenerator()
    async with served(generator) as api, api.chat(prompt_logprobs=2, n=2) as response:
        answer = await response.json()
        assert response.status == 200, answer
    first, second = (generation.request for generation in generator.generations)
    assert (first.sampling.prompt_logprobs, second.sampling.prompt_logprobs) == (2, None)
    shown = answer["prompt_logprobs"]
    assert len(shown) == len(first.prompt.token_ids)
    assert shown[0] is None
    for i, (token_id, entry) in enumerate(
        zip(first.prompt.token_ids[1:], shown[1:], strict=True), 1
    ):
        assert entry[str(token_id)]["logprob"] == -float(i)
        assert set(entry) == {str(token_id), "1", "2"}


async def test_chat_without_them_says_nothing_of_the_prompt() -> None:
    async with served() as api, api.chat() as response:
        assert "prompt_logprobs" not in await response.json()
    for body in ({"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": 21}):
        async with served() as api, api.chat(**body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "prompt_logprobs"
