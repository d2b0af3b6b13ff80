"""Several answers to one prompt: n and best_of."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.generation import GenerationRequest
from pdserve.protocol import FinishReason
from pdserve.shared.errors import NodeLost, Overloaded
from tests.fakes.generator import EOS, FakeGenerator, Pause, Step, Tokens, tiny_tokenizer
from tests.unit.coordinator.api.harness import events_of, is_error_body, served


def word(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def numbered(request: GenerationRequest) -> list[Step]:
    """Choice 2 of "...-2" says "two", and is the likelier the higher its number."""
    number = int(request.request_id.rsplit("-", 1)[-1]) if "-" in request.request_id[9:] else 0
    names = ["zero", "one", "two", "three"]
    logprob = -2.0 + number / 2
    return [
        Tokens(word(names[number]), logprob=logprob),
        Tokens([EOS], FinishReason.STOP, EOS, logprob=logprob),
    ]


async def test_each_choice_is_an_answer_of_its_own() -> None:
    async with served(FakeGenerator(script=numbered)) as api:
        async with api.chat(n=3, seed=7) as response:
            body = await response.json()
        requests = [generation.request for generation in api.generator.generations]
    assert [c["message"]["content"] for c in body["choices"]] == ["zero", "one", "two"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert requests[0].sampling.seed == 7
    assert len({request.sampling.seed for request in requests}) == 3
    assert len({request.request_id for request in requests}) == 3
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(requests[0].prompt.token_ids), "it is computed once"
    assert usage["completion_tokens"] == sum(len(word(w)) + 1 for w in ("zero", "one", "two"))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


async def test_the_same_seed_gives_the_same_seeds() -> None:
    seeds = []
    async with served(FakeGenerator(script=numbered)) as api:
        for _ in range(2):
            api.generator.generations.clear()
            async with api.chat(n=3, seed=2**63 - 1) as response:
                assert response.status == 200
            seeds.append([g.request.sampling.seed for g in api.generator.generations])
    assert seeds[0] == seeds[1]


async def test_a_call_is_refused_as_one() -> None:
    generator = FakeGenerator(start_error=Overloaded("busy", 3.0))
    async with served(generator) as api, api.chat(n=2) as response:
        assert response.status == 429
    assert generator.generations == []


async def test_a_prompt_is_scored_whichever_answer_is_heard_of_first() -> None:
    """Scores come with the first answer, which may be kept back longer than the others."""

    def script(request: GenerationRequest) -> list[Step]:
        is_first = request.sampling.prompt_logprobs is not None
        return [Pause(0.01 if is_first else 0.0), *numbered(request)]

    async with (
        served(FakeGenerator(script=script)) as api,
        api.complete(prompt="ab", n=2, echo=True, logprobs=0) as response,
    ):
        choices = (await response.json())["choices"]
    assert [choice["text"] for choice in choices] == ["abzero", "abone"]
    first, second = (choice["logprobs"]["token_logprobs"] for choice in choices)
    assert len(first) > 2
    assert first[:2] == second[:2]


async def test_choices_are_streamed_together() -> None:
    async with served(FakeGenerator(script=numbered)) as api, api.chat(n=2, stream=True) as stream:
        events = events_of(await stream.read())
    texts = {0: "", 1: ""}
    ends = set()
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                ends.add(choice["index"])
    assert texts == {0: "zero", 1: "one"}
    assert ends == {0, 1}


async def test_prompts_and_choices_multiply() -> None:
    async with (
        served(FakeGenerator(script=numbered)) as api,
        api.complete(prompt=["a", "b"], n=2) as response,
    ):
        body = await response.json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(("n", "shown"), [(None, ["three"]), (2, ["three", "two"])])
async def test_the_best_are_shown(n: int | None, shown: list[str]) -> None:
    async with served(FakeGenerator(script=numbered)) as api:
        async with api.complete(best_of=4, n=n, prompt="a") as response:
            body = await response.json()
        assert response.status == 200
    assert [c["text"] for c in body["choices"]] == shown
    assert [c["index"] for c in body["choices"]] == list(range(len(shown)))
    assert all(c["logprobs"] is None for c in body["choices"]), "nobody asked for them"
    assert len(api.generator.generations) == 4
    assert body["usage"]["completion_tokens"] > 4 * 2 - 1, "all four were computed"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"best_of": 128, "prompt": ["a", "b", "c"]}, "n"),
    ],
)
async def test_too_many_are_refused(body: dict[str, Any], param: str) -> None:
    async with served() as api, api.complete(**body) as response:
        answer = await response.json()
    assert response.status == 400
    assert answer["error"]["param"] == param
    assert api.generator.generations == []


async def test_a_call_fails_as_one() -> None:
    def script(request: GenerationRequest) -> list[Step]:
        if request.request_id.endswith("-1"):
            return [NodeLost("node gone")]
        return [Tokens(word("zero")), Pause(60.0)]

    async with served(FakeGenerator(script=script)) as api, api.chat(n=2) as response:
        assert response.status == 502
        assert is_error_body(await response.json())
    assert api.generator.generations[0].cancels


async def test_more_answers_than_may_ever_be_in_flight() -> None:
    async with served(FakeGenerator(max_inflight=3)) as api:
        for ask, body, param in (
            (api.chat, {"n": 4}, "n"),
            (api.complete, {"n": 2, "best_of": 4}, "n"),
            (api.complete, {"prompt": ["a", "b"], "n": 2}, "n"),
            (api.complete, {"prompt": ["a", "b", "c", "d"]}, "prompt"),
        ):
            async with ask(**body) as response:
                error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, param), error
            assert "for 4 answers, but this server generates at most 3" in error["message"]
        assert api.generator.generations == []
        async with api.chat(n=3) as response:
            assert response.status == 200
