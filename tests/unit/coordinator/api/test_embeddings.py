"""POST /v1/embeddings: inputs, forms, limits, and what becomes of calls that fail half-way."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import openai
import pytest

from coordinator.api.embeddings.places import AT_ONCE
from coordinator.generation import GenerationRequest
from coordinator.models.embedding import EmbeddingModel
from pdserve.shared.errors import NodeLost, Overloaded
from pdserve.shared.pooling import Pooling
from tests.fakes.generator import (
    MODEL,
    FakeGeneration,
    FakeGenerator,
    Pause,
    Step,
    Tokens,
    tiny_tokenizer,
)
from tests.unit.coordinator.api.harness import is_error_body, served


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=True)


def ends(request: GenerationRequest) -> list[Step]:
    return [Tokens([])]


def vector_of(token_ids: list[int], size: int = 4) -> list[float]:
    """What the fake cluster pools, cut and normalised."""
    vector = np.array([len(token_ids), token_ids[0], token_ids[-1], -1.0])[:size]
    return (vector / np.linalg.norm(vector)).tolist()


INPUTS: list[tuple[Any, list[list[int]]]] = [
    ("Hi there", [ids_of("Hi there")]),
    (["Hi", "a longer one"], [ids_of("Hi"), ids_of("a longer one")]),
    ([5, 6, 7], [[5, 6, 7]]),
    ([[5, 6], [7]], [[5, 6], [7]]),
]


@pytest.mark.parametrize(("given", "prompts"), INPUTS)
async def test_inputs_in_all_shapes(given: Any, prompts: list[list[int]]) -> None:
    generator = FakeGenerator(ends)
    async with served(generator) as api, api.embed(input=given) as response:
        answer = await response.json()
        headers = response.headers
    assert [g.request.prompt.token_ids for g in generator.generations] == prompts
    assert [one["index"] for one in answer["data"]] == list(range(len(prompts)))
    for one, prompt in zip(answer["data"], prompts, strict=True):
        assert one["embedding"] == pytest.approx(vector_of(prompt), rel=1e-6)
    num_tokens = sum(map(len, prompts))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"], answer["data"][0]["object"]) == (
        "list",
        MODEL,
        "embedding",
    )
    assert headers["x-pdserve-prefill-node"] == "prefill-0"


async def test_what_nodes_are_asked_for() -> None:
    generator = FakeGenerator(ends)
    async with served(generator) as api, api.embed(cache_salt="s", user="u") as response:
        assert response.status == 200
        (summary,) = api.observer.finished
    request = generator.last.request
    assert request.ends_with_prompt
    assert request.sampling.pooling is Pooling.LAST
    assert request.prompt.cache_salt
    assert request.slo.name
    assert (summary.endpoint, summary.status, summary.error_code) == ("/v1/embeddings", 200, None)
    assert (summary.num_prompt_tokens, summary.num_cached_tokens) == (
        len(request.prompt.token_ids),
        3,
    )


async def test_the_sdk_gets_the_same_in_both_forms() -> None:
    async with (
        served(FakeGenerator(ends)) as api,
        openai.AsyncOpenAI(base_url=api.base_url, api_key="-", max_retries=0) as client,
    ):
        # Without a form the SDK asks for base64, and decodes it.
        packed = await client.embeddings.create(model=MODEL, input=["a", "bc"])
        plain = await client.embeddings.create(
            model=MODEL, input=["a", "bc"], encoding_format="float"
        )
        raw = await client.embeddings.create(model=MODEL, input="a", encoding_format="base64")
    assert [one.embedding for one in packed.data] == [one.embedding for one in plain.data]
    assert packed.data[1].embedding == pytest.approx(vector_of(ids_of("bc")), rel=1e-6)
    assert packed.usage == plain.usage
    text: Any = raw.data[0].embedding
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == plain.data[0].embedding


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [[1], "a", 2]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [5] * 513}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 2}, "dimensions"),
        ({"temperature": 1}, "temperature"),
        ({"slo_class": "no such"}, "slo_class"),
    ],
)
async def test_what_is_refused(body: dict[str, Any], param: str) -> None:
    generator = FakeGenerator(ends)
    async with served(generator) as api, api.embed(**body) as response:
        answer = await response.json()
    assert (response.status, is_error_body(answer)) == (400, True)
    assert answer["error"]["param"] == param
    assert generator.generations == []


MATRYOSHKA = EmbeddingModel(most_dimensions=4, dimensions=(2, 4))


async def test_dimensions_are_the_first_ones_normalised_again() -> None:
    async with served(FakeGenerator(ends), embedding_model=MATRYOSHKA) as api:
        async with api.embed(input=[5, 6], dimensions=2) as response:
            (one,) = (await response.json())["data"]
            assert one["embedding"] == pytest.approx(vector_of([5, 6], 2), rel=1e-6)
        for dimensions, says in ((3, "trained for 2, 4"), (5, "embeddings have 4")):
            async with api.embed(dimensions=dimensions) as response:
                assert response.status == 400
                assert says in (await response.json())["error"]["message"]


async def test_a_model_without_embeddings_says_why() -> None:
    model = EmbeddingModel(refusal="this model makes its embeddings with Dense")
    async with served(embedding_model=model) as api, api.embed() as response:
        assert response.status == 400
        assert "with Dense" in (await response.json())["error"]["message"]


async def test_many_inputs_run_a_few_at_a_time_and_come_in_order() -> None:
    gate = asyncio.Event()
    generator = FakeGenerator(lambda request: [Pause(until=gate), Tokens([])])
    inputs = [[i % 400, 7] for i in range(3 * AT_ONCE)]
    async with served(generator) as api:
        call = asyncio.ensure_future(api.embed(input=inputs))
        await until_started(generator, AT_ONCE)
        gate.set()
        async with await call as response:
            data = (await response.json())["data"]
    assert len(generator.generations) == len(inputs)
    for one, prompt in zip(data, inputs, strict=True):
        assert one["embedding"] == pytest.approx(vector_of(prompt), rel=1e-6)


async def test_calls_of_one_payer_share_its_places_and_take_turns() -> None:
    gate = asyncio.Event()
    generator = FakeGenerator(lambda request: [Pause(until=gate), Tokens([])])
    async with served(generator) as api:
        calls = [
            asyncio.ensure_future(api.embed(input=[[call, 7]] * 2 * AT_ONCE)) for call in range(4)
        ]
        await until_started(generator, AT_ONCE)
        gate.set()
        for call in calls:
            async with await call as response:
                assert response.status == 200
    order = [g.request.prompt.token_ids[0] for g in generator.generations]
    last = [len(order) - order[::-1].index(call) for call in range(4)]
    assert min(last) > len(order) // 2, "none has all of its turns before the others"


async def until_started(generator: FakeGenerator, num: int) -> None:
    """Wait until so many have begun, and for a while in which more would."""
    async with asyncio.timeout(30):
        while len(generator.generations) < num:
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0.001)
    assert len(generator.generations) == num


class NarrowGenerator(FakeGenerator):
    """Refuses whatever comes while as many as it has places for are under way."""

    num_places = 2
    num_refused = 0

    def start(self, request: GenerationRequest) -> FakeGeneration:
        if sum(not g.is_over for g in self.generations) >= self.num_places:
            self.num_refused += 1
            raise Overloaded("full")
        return super().start(request)


async def test_what_is_refused_half_way_waits_for_the_others() -> None:
    generator = NarrowGenerator(lambda request: [Pause(0.001), Tokens([])])
    async with served(generator) as api, api.embed(input=[[i] for i in range(9)]) as response:
        assert len((await response.json())["data"]) == 9
        assert generator.num_refused > 0
        generator.num_places = 0
        async with api.embed() as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1


async def test_a_failure_ends_the_whole_call() -> None:
    never = asyncio.Event()

    def script(request: GenerationRequest) -> list[Step]:
        is_second = request.prompt.token_ids == [2]
        return [NodeLost("gone")] if is_second else [Pause(until=never), Tokens([])]

    generator = FakeGenerator(script)
    async with served(generator) as api, api.embed(input=[[1], [2], [3]]) as response:
        answer = await response.json()
    assert (response.status, answer["error"]["code"]) == (502, "node_lost")
    assert all(g.cancels for g in generator.generations)


async def test_a_client_that_goes_away_frees_its_prompts() -> None:
    never = asyncio.Event()
    generator = FakeGenerator(lambda request: [Pause(until=never), Tokens([])])
    async with served(generator) as api:
        call = asyncio.ensure_future(api.embed(input=[[1], [2]]))
        async with asyncio.timeout(30):
            await generator.started.wait()
            call.cancel()
            await asyncio.wait([call])
            await api.observer.over.wait()
    assert all(g.cancels for g in generator.generations)
    assert api.observer.finished[0].error_code == "client_disconnected"


async def test_memory_of_its_prompts_is_held_until_they_have_ended() -> None:
    """Calls whose prompts wait for their turns would fill it, however short their bodies were."""
    never = asyncio.Event()
    generator = FakeGenerator(lambda request: [Pause(until=never), Tokens([])])
    async with served(generator) as api:
        call = asyncio.ensure_future(api.embed(input=[[7] * 100] * 40))
        async with asyncio.timeout(30):
            await generator.started.wait()
            assert api.server_context.bodies.num_bytes == 40 * 100 * 8
            never.set()
            async with await call as response:
                assert response.status == 200
                await response.read()
            await api.observer.over.wait()
        assert api.server_context.bodies.num_bytes == 0
