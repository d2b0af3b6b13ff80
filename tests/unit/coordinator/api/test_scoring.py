"""POST /v1/rerank and /v1/score: forms, prompts, scores, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from coordinator.api.scoring import pairs
from coordinator.generation import GenerationRequest
from coordinator.models.scoring import AFTER, BEFORE, ScoringModel, YesNo
from pdserve.shared.errors import NodeLost
from tests.fakes.generator import MODEL, FakeGenerator, Step, Tokens, tiny_tokenizer
from tests.unit.coordinator.api.harness import Harness, is_error_body, served

YES, NO = 50, 60
JUDGE = ScoringModel(YesNo(YES, NO))
COSINE = ScoringModel()
DOCUMENTS = ["Hello", "a small test", "fox"]
DEFAULT = "Given a web search query, retrieve relevant passages that answer the query"
PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")


def judged(request: GenerationRequest) -> list[Step]:
    return [Tokens([YES])]  # whose log-probability is 1 above that of "no"


def embedded(request: GenerationRequest) -> list[Step]:
    return [Tokens([])]


def prompt_of(query: str, document: str, instruction: str = DEFAULT) -> list[int]:
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    parts = (BEFORE, pair, AFTER)
    return [i for part in parts for i in tiny_tokenizer().encode(part, add_special_tokens=False)]


async def post(api: Harness, path: str, **body: Any) -> tuple[int, Any]:
    async with api.client.post(path, json={"model": MODEL, **body}) as response:
        return response.status, await response.json()


async def rerank(api: Harness, path: str = "/v1/rerank", **body: Any) -> tuple[int, Any]:
    return await post(api, path, **({"query": "Q", "documents": DOCUMENTS} | body))


@pytest.mark.parametrize("path", PATHS)
async def test_a_reranker_is_asked_about_each_document(path: str) -> None:
    generator = FakeGenerator(judged)
    async with served(generator, scoring=JUDGE) as api:
        status, answer = await rerank(api, path, documents=["Hello", {"text": "fox"}])
        (summary,) = api.observer.finished
    assert status == 200, answer
    prompts = [prompt_of("Q", "Hello"), prompt_of("Q", "fox")]
    requests = [g.request for g in generator.generations]
    assert [request.prompt.token_ids for request in requests] == prompts
    for request in requests:
        assert request.sampling.max_tokens == 1
        assert request.sampling.logprob_token_ids == [YES, NO]
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == [pytest.approx(1 / (1 + math.exp(-1)))] * 2
    shown = [one.get("document") for one in answer["results"]]
    assert shown == ([None] * 2 if path == "/v2/rerank" else [{"text": "Hello"}, {"text": "fox"}])
    num_tokens = sum(map(len, prompts))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["model"], answer["id"].startswith("rerank-")) == (MODEL, True)
    assert (summary.endpoint, summary.num_prompt_tokens) == (path, num_tokens)


async def test_the_best_come_first_and_equal_ones_as_they_came() -> None:
    async with served(FakeGenerator(embedded), scoring=COSINE) as api:
        _, answer = await rerank(api, query="fox", return_documents=False)
        _, best = await rerank(api, query="fox", top_n=1)
    order = [(one["index"], one["relevance_score"]) for one in answer["results"]]
    assert order[0] == (2, pytest.approx(1.0))  # itself
    assert [score for _, score in order] == sorted((s for _, s in order), reverse=True)
    (one,) = best["results"]
    assert one == {
        "index": 2,
        "relevance_score": pytest.approx(1.0),
        "document": {"text": "fox"},
    }


async def test_an_instruction_and_truncation_leave_what_is_around_the_document() -> None:
    generator = FakeGenerator(judged)
    frame = sum(
        len(tiny_tokenizer().encode(part, add_special_tokens=False)) for part in (BEFORE, AFTER)
    )
    async with served(generator, scoring=JUDGE) as api:
        await rerank(api, documents=["fox"], instruction="Find animals")
        assert generator.last.request.prompt.token_ids == prompt_of("Q", "fox", "Find animals")
        await rerank(api, documents=["fox " * 900], truncate_prompt_tokens=-1)
        cut = generator.last.request.prompt.token_ids
        refused, answer = await rerank(api, truncate_prompt_tokens=frame)
        status, _ = await rerank(api, truncation_side="left")
    assert len(cut) == 511  # and one token is left to say yes or no
    assert cut[-8:] == prompt_of("Q", "fox")[-8:]
    assert (refused, answer["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert status == 400


SIDES: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"text_1": "a", "text_2": "b"}, [("a", "b")]),
    ({"text_1": "a", "text_2": ["b", "c"]}, [("a", "b"), ("a", "c")]),
    ({"text_1": ["a", "d"], "text_2": ["b", "c"]}, [("a", "b"), ("d", "c")]),
    ({"text_1": ["a", "d"], "text_2": "b"}, [("a", "b"), ("d", "b")]),
    ({"queries": "a", "documents": ["b"]}, [("a", "b")]),
]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(("sides", "pairs"), SIDES)
async def test_scores_of_pairs(path: str, sides: Any, pairs: Any) -> None:
    generator = FakeGenerator(judged)
    async with served(generator, scoring=JUDGE) as api:
        status, answer = await post(api, path, **sides)
    assert status == 200, answer
    prompts = [g.request.prompt.token_ids for g in generator.generations]
    assert prompts == [prompt_of(*pair) for pair in pairs]
    assert [(one["index"], one["object"]) for one in answer["data"]] == [
        (i, "score") for i in range(len(pairs))
    ]
    assert answer["object"] == "list"


async def test_cosines_are_of_two_embeddings_each_made_once() -> None:
    generator = FakeGenerator(embedded)
    async with served(generator, scoring=COSINE) as api:
        _, answer = await post(api, "/v1/score", text_1="fox", text_2=["fox", "Hello", "fox"])
    assert len(generator.generations) == 4
    first, second, third = (one["score"] for one in answer["data"])
    assert first == third == pytest.approx(1.0)
    assert second < first


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "Q", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "Q", "documents": ["a", ""]}, "documents[1]"),
    ("/v1/rerank", {"query": "Q", "documents": ["a"] * 2049}, "documents"),
    ("/v1/rerank", {"query": "Q", "documents": [{"title": "a"}]}, "documents[0].title"),
    ("/v1/rerank", {"query": "Q", "documents": ["a"], "top_n": 0}, "top_n"),
    ("/v1/rerank", {"query": "Q", "documents": ["a"], "rank_fields": ["b"]}, "rank_fields"),
    ("/v1/rerank", {"query": "Q", "documents": ["fox " * 900]}, "documents"),
    (
        "/v1/rerank",
        {"query": "Q", "documents": ["a"], "truncation_side": "left"},
        "truncation_side",
    ),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ("/v1/score", {"text_1": "a"}, "text_2"),
    ("/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
async def test_what_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    generator = FakeGenerator(judged)
    async with served(generator, scoring=JUDGE) as api:
        status, answer = await post(api, path, **body)
    assert (status, is_error_body(answer)) == (400, True)
    assert answer["error"]["param"] == param
    assert generator.generations == []


async def test_a_model_that_does_neither_says_what_to_do() -> None:
    async with served(FakeGenerator(judged)) as api:
        status, answer = await rerank(api)
    assert (status, answer["error"]["param"]) == (400, "model")
    assert "--set answers.scoring=yes-no" in answer["error"]["message"]


async def test_embeddings_take_no_instruction_and_failures_keep_their_status() -> None:
    async with served(FakeGenerator(embedded), scoring=COSINE) as api:
        assert (await rerank(api, instruction="Find"))[1]["error"]["param"] == "instruction"
    lost = FakeGenerator(lambda request: [NodeLost("gone")])
    async with served(lost, scoring=JUDGE) as api:
        assert (await rerank(api))[0] == 502


async def test_moderations_are_refused_by_name() -> None:
    async with served() as api:
        status, answer = await post(api, "/v1/moderations", input="a")
    assert status == 404
    assert "moderations need a classifier" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("query", "number", "most", "param"),
    [("Q" * 200_000, 3, 2**24, "documents"), ("Q" * 100, 40, 4_000, "documents")],
    ids=["each", "all"],
)
async def test_a_query_is_not_repeated_beyond_what_could_be_served(
    query: str, number: int, most: int, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 16 MiB would become as many texts of 8 MiB as it has documents."""

    def pair(*given: Any) -> str:
        raise AssertionError("its texts are made before they are counted")

    monkeypatch.setattr(YesNo, "pair", pair)
    monkeypatch.setattr(pairs, "MAX_PAIR_CHARS", most)
    async with served(FakeGenerator(judged), scoring=JUDGE) as api:
        status, answer = await rerank(api, query=query, documents=["fox"] * number)
    assert (status, answer["error"]["param"]) == (400, param), answer
