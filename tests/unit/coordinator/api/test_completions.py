"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import tokenizers

from coordinator.api.answer.choice import ScoredToken
from coordinator.api.answer.logprobs import TokenNames, completion_logprobs
from coordinator.generation import GenerationRequest
from coordinator.text import Tokenizer
from pdserve.protocol import TokenLogprobs
from pdserve.shared.errors import Overloaded
from tests.fakes.generator import (
    MODEL,
    FakeGeneration,
    FakeGenerator,
    Step,
    says,
    tiny_tokenizer,
)
from tests.unit.coordinator.api.harness import events_of, served
from tests.unit.coordinator.text import made_tokenizers as made


async def test_whole_answer_with_the_sdk() -> None:
    async with served() as api, openai.AsyncOpenAI(base_url=api.base_url, api_key="-") as client:
        answer = await client.completions.create(model=MODEL, prompt="Hi there")
        sent = api.generator.last.request
    assert answer.choices[0].text == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert sent.request_id.startswith(answer.id)
    assert sent.sampling.max_tokens == 16
    assert sent.prompt.token_ids == tiny_tokenizer().encode("Hi there", add_special_tokens=True)
    assert sent.prompt.token_ids[0] == 0


async def test_stream_with_the_sdk() -> None:
    generator = FakeGenerator(says("Hello world", pause_s=0.002))
    async with (
        served(generator) as api,
        openai.AsyncOpenAI(base_url=api.base_url, api_key="-") as client,
    ):
        stream = await client.completions.create(
            model=MODEL, prompt="Hi", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "Hello world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["one", [7]], ["one", [7]]),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_shapes_of_prompts(prompt: Any, texts: list[Any], stream: bool) -> None:
    def script(request: GenerationRequest) -> Sequence[Step]:
        return says(f"to {request.prompt.token_ids}")(request)

    expected = [
        text if isinstance(text, list) else tiny_tokenizer().encode(text, add_special_tokens=True)
        for text in texts
    ]
    body = {"prompt": prompt, "stream": stream, "max_tokens": 50}
    async with served(FakeGenerator(script)) as api, api.complete(**body) as response:
        assert response.status == 200
        if stream:
            events = events_of(await response.read())[:-1]
            choices = [event["choices"][0] for event in events]
            assert len([c for c in choices if c["finish_reason"]]) == len(texts)
        else:
            answer = await response.json()
            choices = answer["choices"]
            assert answer["usage"]["prompt_tokens"] == sum(len(ids) for ids in expected)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * len(texts)
    answers = [
        "".join(choice["text"] for choice in choices if choice["index"] == i)
        for i in range(len(texts))
    ]
    assert answers == [f"to {ids}" for ids in expected]
    assert [g.request.prompt.token_ids for g in api.generator.generations] == expected
    assert len({g.request.request_id for g in api.generator.generations}) == len(texts)


async def test_one_prompt_ends_before_another() -> None:
    def script(request: GenerationRequest) -> Sequence[Step]:
        is_first = request.request_id.endswith("-0")
        return says("a b STOP c d e f" if is_first else "g h i j k l", pause_s=0.002)(request)

    body = {"prompt": ["x", "y"], "stop": "STOP"}
    async with served(FakeGenerator(script)) as api, api.complete(**body) as response:
        body = await response.json()
    assert [choice["text"] for choice in body["choices"]] == ["a b ", "g h i j k l"]
    assert [g.cancels for g in api.generator.generations] == [["stop string"], []]


async def test_a_refused_prompt_ends_the_others() -> None:
    class Picky(FakeGenerator):
        def start(self, request: GenerationRequest) -> FakeGeneration:
            if len(self.generations) == 2:
                raise Overloaded("full")
            return super().start(request)

    async with served(Picky()) as api, api.complete(prompt=["a", "b", "c"]) as response:
        assert response.status == 429
    assert [len(g.cancels) for g in api.generator.generations] == [1, 1]


@pytest.mark.parametrize(
    ("prompt", "says_what"),
    [
        ([], "must be"),
        (None, "must be"),
        ({}, "must be"),
        ([1, "a"], "must be"),
        ([True], "must be"),
        ([[]], "at least one token"),
        ([1, 10**9], "token id 1000000000"),
        ([-1], "token id -1"),
        (["x"] * 65, "at most 64"),
        ("x" * 10**6, "exceed by far"),
        ([5] * 1000, "1000 items"),
    ],
)
async def test_an_impossible_prompt_is_refused_and_says_why(prompt: Any, says_what: str) -> None:
    async with served() as api, api.complete(prompt=prompt) as response:
        body = await response.json()
    assert response.status == 400
    assert body["error"]["param"] == "prompt"
    assert says_what in body["error"]["message"]


async def test_an_empty_text_has_the_bos_token() -> None:
    async with served() as api:
        async with api.complete(prompt="") as response:
            assert response.status == 200
        assert api.generator.last.request.prompt.token_ids == [0]
        async with api.complete(prompt="", add_special_tokens=False) as response:
            assert response.status == 400


async def test_logprobs() -> None:
    async with served(FakeGenerator(says("a🦊 b"))) as api:
        async with api.complete(logprobs=2) as response:
            whole = (await response.json())["choices"][0]
        async with api.complete(logprobs=2, stream=True) as response:
            events = events_of(await response.read())
        async with api.complete(logprobs=0) as response:
            chosen_only = (await response.json())["choices"][0]["logprobs"]
    shown = whole["logprobs"]
    assert shown["tokens"][0] == "a"
    assert shown["tokens"][1].startswith("bytes:\\xf0")
    assert shown["token_logprobs"] == [-0.5] * len(shown["tokens"])
    assert all(1 <= len(top) <= 3 for top in shown["top_logprobs"])
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert whole["text"][offset:].startswith(token)
    streamed: dict[str, list[Any]] = {"tokens": [], "text_offset": []}
    for event in events[:-1]:
        for key, values in streamed.items():
            values += event["choices"][0]["logprobs"][key]
    assert streamed == {key: shown[key] for key in streamed}
    assert [len(top) for top in chosen_only["top_logprobs"]] == [1] * len(shown["tokens"])


def test_of_tokens_with_one_name_the_chosen_one_is_listed_or_the_likeliest() -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(made.byte_fallback_json()))
    byte, letter = tokenizer.token_id("<0x61>"), tokenizer.token_id("a")
    other = tokenizer.token_id("b")
    assert byte is not None
    assert letter is not None
    assert other is not None
    found = TokenLogprobs(chosen=-1.0, top_ids=[byte, letter], top_logprobs=[-1.0, -2.0])
    tokens = [ScoredToken(chosen, 0, found) for chosen in (byte, other)]
    shown = completion_logprobs(tokens, TokenNames(tokenizer), 2)
    assert shown.top_logprobs == [{"a": -1.0}, {"b": -1.0, "a": -1.0}]


async def test_logprobs_end_where_the_text_ends() -> None:
    generator = FakeGenerator(says("one two STOP three"))
    async with served(generator) as api, api.complete(logprobs=0, stop="STOP") as response:
        choice = (await response.json())["choices"][0]
    assert choice["text"] == "one two "
    assert all(offset < len(choice["text"]) for offset in choice["logprobs"]["text_offset"])


async def test_extensions_reach_the_nodes() -> None:
    body = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -100, "6": 2.5},
        "seed": -1,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7, 8, 7],
        "allowed_token_ids": [9, 7, 9],
        "bad_words": ["ab", " ab", " ", "\n"],
        "logprobs": 1,
        "logprob_token_ids": [5, 6],
        "cache_salt": "tenant",
    }
    async with served(deadline_s=5.0) as api, api.complete(**body) as response:
        assert response.status == 200
        sent = api.generator.last.request
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.logit_bias == {5: -100.0, 6: 2.5}
    assert 0 <= sampling.seed < 2**63
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (9, 2, True)
    assert sampling.stop_token_ids == [7, 8]
    assert sampling.allowed_token_ids == [9, 7]
    words = [tiny_tokenizer().decode(word.token_ids) for word in sampling.bad_words]
    assert words == ["ab", " ab", " ", "\n", " \n"], "at the beginning of a text, and after a space"
    assert sampling.logprob_token_ids == [5, 6]
    assert sent.prompt.cache_salt == "tenant"
    assert 4.0 < sent.deadline_s < 5.0  # less what passed since receipt


async def test_the_default_length_shrinks_to_the_context() -> None:
    async with served(FakeGenerator(max_model_len=10)) as api:
        async with api.complete(prompt=[5] * 7) as response:
            assert response.status == 200
        assert api.generator.last.request.sampling.max_tokens == 3
        async with api.complete(prompt=[5] * 10) as response:
            assert (await response.json())["error"]["code"] == "context_length_exceeded"
        async with api.complete(prompt=[5] * 7, max_tokens=4) as response:
            assert (await response.json())["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
async def test_the_stop_string_is_shown_on_demand(name: str, include: bool) -> None:
    generator = FakeGenerator(says("one two STOP three"))
    body = {"stop": ["STOP", "unused"], name: include}
    async with served(generator) as api, api.complete(**body) as response:
        text = (await response.json())["choices"][0]["text"]
    assert text == ("one two STOP" if include else "one two ")


async def test_requests_run_side_by_side() -> None:
    async with served(FakeGenerator(says("x y z", pause_s=0.05))) as api:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        async with api.complete(prompt=["a"] * 20) as response:
            assert len((await response.json())["choices"]) == 20
        assert loop.time() - started_s < 2
