"""What is told of prompts is transformers', disaggregated and co-located.

That is their log-probabilities, embeddings, and scores by yes or no and by cosine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from pdserve.settings.answers import AnswerConfig
from tests.cluster.checkpoints import VOCAB_SIZE, Reference, make_prompt, make_tiny_of
from tests.cluster.client import MODEL
from tests.cluster.fleet import Fleet, SecondCoordinator, fleet_config, running
from tests.matrix import matrix

BUDGET = 37  # no chunk ends where a block of 16 ends
NUM_TOP = 3
WORDS = ["yes", "no"]  # that the model may answer, as tokens


@dataclass(frozen=True)
class Served:
    """One checkpoint, served both ways."""

    urls: dict[str, str]  # by mode
    reference: Reference
    tokenizer: Tokenizer


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    checkpoint = make_tiny_of(tmp_path_factory.mktemp("judge"), vocab_size=VOCAB_SIZE + len(WORDS))
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.add_tokens(WORDS)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    async with AsyncExitStack() as stack:
        second = SecondCoordinator(
            checkpoint, mode="colocated", answers=AnswerConfig(pooling="mean")
        )
        stack.callback(second.release_ports)
        await stack.enter_async_context(second)
        config = fleet_config(
            checkpoint,
            engine={"token_budget": BUDGET, "block_size": 16},
            answers=AnswerConfig(scoring="yes-no"),
        )
        fleet = Fleet(config, {"decode-0": [f"--coordinators={second.grpc_address}"]})
        await stack.enter_async_context(running(fleet))
        await second.wait_ready(["decode-0"])
        urls = {"disaggregated": fleet.url, "colocated": second.url}
        yield Served(urls, Reference(checkpoint), tokenizer)


async def complete(url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body | fields) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


@pytest.mark.parametrize("mode", matrix(["disaggregated", "colocated"], 1))
async def test_echoed_prompts_have_the_logprobs_of_transformers(served: Served, mode: str) -> None:
    url = served.urls[mode]
    prompts = [make_prompt(length, "echo") for length in (1, 2, 90)]
    await complete(url, prompt=prompts, max_tokens=2)  # what is cached must not go unscored
    answer = await complete(url, prompt=prompts, echo=True, logprobs=NUM_TOP, max_tokens=4)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        found = choice["logprobs"]
        output = served.reference.greedy(prompt, 4)
        expected = served.reference.logprobs(prompt + output)  # [num_tokens - 1, vocab_size]
        chosen = expected.gather(1, expected.new_tensor(prompt + output)[1:, None].long())
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(chosen[:, 0].tolist(), abs=1e-3)
        best = [max(top.values()) for top in found["top_logprobs"][1:]]
        assert best == pytest.approx(expected.amax(dim=1).tolist(), abs=1e-3)
        assert len(found["tokens"]) == len(found["text_offset"]) == len(prompt) + 4
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
async def test_the_prompt_alone(served: Served, mode: str) -> None:
    prompt = make_prompt(70, "alone")
    answer = await complete(served.urls[mode], prompt=prompt, prompt_logprobs=NUM_TOP, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0
    expected = served.reference.logprobs(prompt)
    shown = choice["prompt_logprobs"]
    assert len(shown) == len(prompt)
    assert shown[0] is None
    for row, token_id, found in zip(expected, prompt[1:], shown[1:], strict=True):
        wanted = {str(i) for i in [token_id, *row.topk(NUM_TOP).indices.tolist()]}
        assert set(found) == wanted
        for name, entry in found.items():
            assert entry["logprob"] == pytest.approx(row[int(name)].item(), abs=1e-3)
            assert entry["rank"] == int((row > row[int(name)]).sum()) + 1


async def test_chats_have_them_beside_their_choices(served: Served) -> None:
    messages = [{"role": "user", "content": "How are you?"}]
    body = {"model": MODEL, "messages": messages, "prompt_logprobs": 0, "max_completion_tokens": 2}
    async with aiohttp.ClientSession(served.urls["disaggregated"]) as session:
        async with session.post("/tokenize", json={"messages": messages}) as response:
            prompt = (await response.json())["tokens"]
        async with session.post("/v1/chat/completions", json=body) as response:
            shown = (await response.json())["prompt_logprobs"]
    expected = served.reference.logprobs(prompt)
    for row, token_id, found in zip(expected, prompt[1:], shown[1:], strict=True):
        assert found[str(token_id)]["logprob"] == pytest.approx(row[token_id].item(), abs=1e-3)


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
async def test_embeddings_are_pooled_states(served: Served, mode: str) -> None:
    """The last one's, and of the other coordinator the mean; among prompts that are cached."""
    prompts = [make_prompt(length, "embed") for length in (1, 37, 90)]
    url = served.urls[mode]
    await complete(url, prompt=prompts, max_tokens=2)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        plain, packed = [
            await client.embeddings.create(model=MODEL, input=prompts, encoding_format=form)
            for form in ("float", openai.NOT_GIVEN)
        ]
    for prompt, one, other in zip(prompts, plain.data, packed.data, strict=True):
        states = served.reference.states(prompt)
        pooled = states[-1] if mode == "disaggregated" else states.mean(dim=0)
        assert one.embedding == pytest.approx((pooled / pooled.norm()).tolist(), abs=1e-4)
        assert other.embedding == pytest.approx(one.embedding, abs=1e-6)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == 128


async def test_embedding_takes_a_prefill_node_and_no_other(served: Served) -> None:
    body = {"model": MODEL, "input": ["Once upon a time", "there was"]}
    async with (
        aiohttp.ClientSession(served.urls["disaggregated"]) as session,
        session.post("/v1/embeddings", json=body) as response,
    ):
        assert response.headers["x-pdserve-prefill-node"] == "prefill-0"
        assert "x-pdserve-decode-node" not in response.headers


async def test_a_reranker_scores_as_its_model_card_says(served: Served) -> None:
    """The probability of yes among yes and no, after the published prompt; on a prefill node."""
    documents = ["It is hot.", "Colder than ice, and no more.", "Rain"]
    body = {"model": MODEL, "query": "Is it cold?", "documents": documents}
    async with (
        aiohttp.ClientSession(served.urls["disaggregated"]) as session,
        session.post("/v1/rerank", json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        assert response.headers["x-pdserve-prefill-node"] == "prefill-0"
        assert "x-pdserve-decode-node" not in response.headers
    yes, no = (served.tokenizer.token_to_id(word) for word in WORDS)
    expected = {}
    for index, document in enumerate(documents):
        text = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            "Query and the Instruct provided. Note that the answer can only be "
            '"yes" or "no".<|im_end|>\n<|im_start|>user\n'
            "<Instruct>: Given a web search query, retrieve relevant passages that answer the "
            f"query\n<Query>: Is it cold?\n<Document>: {document}"
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        ids = served.tokenizer.encode(text, add_special_tokens=False).ids
        last = served.reference.logprobs([*ids, 0])[-1]  # of the token after the prompt
        expected[index] = torch.softmax(last[[yes, no]], dim=0)[0].item()
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert found == {index: pytest.approx(score, abs=1e-4) for index, score in expected.items()}
    assert list(found) == sorted(expected, key=lambda index: -expected[index])


async def test_an_embedding_model_scores_by_cosine(served: Served) -> None:
    texts = ["Is it cold?", "It is hot.", "Colder than ice."]
    body = {"model": MODEL, "text_1": texts[0], "text_2": texts[1:]}
    async with (
        aiohttp.ClientSession(served.urls["colocated"]) as session,
        session.post("/v1/score", json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
    states = [served.reference.states(served.tokenizer.encode(text).ids) for text in texts]
    query, *others = (found.mean(dim=0) for found in states)
    expected = [torch.cosine_similarity(query, other, dim=0).item() for other in others]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-4)
