"""Answers with very many log-probabilities: bounded, and made in pieces between other work."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.api.answer.arrivals import PIECE, LongWork, WriteTurns
from coordinator.api.answer.choice import MAX_SCORED, Choice, ChoiceDelta
from coordinator.api.plan.generations import MAX_ECHOED_TOKENS, MAX_LOGPROBS
from coordinator.generation import GenerationRequest
from pdserve.protocol import FinishReason
from pdserve.shared.clock import SystemClock
from tests.fakes.generator import FakeGenerator, Step, Tokens, tiny_tokenizer
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import served

MANY = 4000  # tokens: several pieces
IDS = tiny_tokenizer().encode("a", add_special_tokens=False)


def long_answer(request: GenerationRequest) -> Sequence[Step]:
    """An answer that arrives at once, as for a client that has not read for a while."""
    return [Tokens(IDS * MANY, FinishReason.LENGTH)]


class Watched:
    """What one turn of the event loop is used for, in tokens: turn |-> amount."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: Counter[int] = Counter()
        self.echoed: Counter[int] = Counter()
        self._turn = 0
        take, echo = Choice.take, Choice.echo

        def take_watched(choice: Choice) -> ChoiceDelta | None:
            delta = take(choice)
            if delta is not None:
                self.taken[self._turn] += len(delta.tokens) + len(delta.prompt_logprobs)
            return delta

        def echo_watched(choice: Choice, num_tokens: int) -> bool:
            has_echoed = echo(choice, num_tokens)
            self.echoed[self._turn] += num_tokens * has_echoed
            return has_echoed

        monkeypatch.setattr(Choice, "take", take_watched)
        monkeypatch.setattr(Choice, "echo", echo_watched)

    def begin(self) -> None:
        self._turn += 1
        asyncio.get_running_loop().call_soon(self.begin)


@pytest.mark.parametrize(
    ("path", "fields"),
    matrix(
        [
            (
                "chat/completions",
                {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True},
            ),
            ("completions", {"prompt": "Hi", "logprobs": 20}),
            ("completions", {"prompt": IDS * MANY, "logprobs": 1, "echo": True, "max_tokens": 0}),
            ("responses", {"input": "Hi", "include": ["message.output_text.logprobs"]}),
        ],
        1,
    ),
)
@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_turn_of_the_loop_encodes_one_piece(
    path: str, fields: dict[str, Any], is_streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_pieces(path, fields | {"stream": is_streaming}, monkeypatch)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": IDS * MANY, "max_tokens": 0}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * MANY}]}),
    ],
)
async def test_a_turn_of_the_loop_encodes_one_piece_of_a_prompt(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_pieces(path, fields | {"prompt_logprobs": 1}, monkeypatch)


async def check_pieces(path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    generator = FakeGenerator(long_answer, max_model_len=3 * MANY)
    body = {"model": "org/tiny-model", "max_tokens": MANY} | fields
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    async with served(generator) as api:
        watched.begin()
        async with api.client.post(f"/v1/{path}", json=body) as response:
            text = await response.text()
    assert response.status == 200, text
    assert sum(watched.taken.values()) >= MANY - 1
    assert max(watched.taken.values()) <= MAX_SCORED
    assert max(watched.echoed.values(), default=0) <= PIECE


@pytest.mark.parametrize("size", matrix([3 * MAX_SCORED + 5, 1, MAX_SCORED, 3 * MAX_SCORED], 1))
@pytest.mark.parametrize("logprobs", [0, 2])
async def test_pieces_add_up_to_the_whole(size: int, logprobs: int) -> None:
    """Cut into several deltas or not, every token, offset and character is there once."""
    text = "".join(f"{n % 7} é" for n in range(size))
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)[:size]
    generator = FakeGenerator(lambda _: [Tokens(ids, FinishReason.LENGTH)], max_model_len=8192)
    fields: dict[str, Any] = {"max_tokens": size, "logprobs": logprobs, "prompt": ids, "echo": True}
    async with served(generator) as api, api.complete(**fields) as response:
        (choice,) = (await response.json())["choices"]
    shown = choice["logprobs"]
    assert choice["text"] == 2 * tiny_tokenizer().decode(ids, skip_special_tokens=False)
    assert len(shown["tokens"]) == len(shown["token_logprobs"]) == len(shown["top_logprobs"])
    assert len(shown["tokens"]) == 2 * len(ids)
    assert shown["text_offset"] == sorted(shown["text_offset"])
    assert choice["finish_reason"] == "length"


async def test_no_call_has_more_log_probabilities_than_the_bound() -> None:
    num_tokens = 100
    too_many: dict[str, Any] = {"n": 128, "max_tokens": num_tokens}
    assert 128 * num_tokens * 21 > MAX_LOGPROBS
    async with served() as api:
        async with api.chat(**too_many, logprobs=True, top_logprobs=20) as response:
            error = (await response.json())["error"]
        async with api.complete(**too_many, logprobs=20) as completed:
            assert completed.status == 400
        assert not api.generator.generations
        async with api.chat(**too_many, logprobs=True, top_logprobs=19) as response_within:
            assert response_within.status == 200
    assert response.status == 400
    assert error["param"] == "logprobs"
    assert str(128 * num_tokens * 21) in error["message"]
    assert str(MAX_LOGPROBS) in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 20, "echo": True, "n": 16}, "logprobs"),
        ({"prompt_logprobs": 20, "n": 16}, "prompt_logprobs"),
        ({"best_of": 16, "n": 1, "logprobs": 20, "echo": True}, "logprobs"),
        ({"echo": True, "n": 128}, "echo"),
    ],
)
async def test_scores_of_prompts_count_for_each_answer(fields: dict[str, Any], param: str) -> None:
    num_tokens = MAX_ECHOED_TOKENS // 128 + 1
    generator = FakeGenerator(max_model_len=2 * num_tokens)
    fields = {"prompt": IDS * num_tokens, "max_tokens": 1} | fields
    async with served(generator) as api:
        async with api.complete(**fields) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param)
        async with api.complete(**fields | {"n": 1, "best_of": 1}) as response:
            assert response.status == 200


@pytest.mark.long
async def test_prompts_of_a_call_share_the_bound() -> None:
    num_tokens = MAX_LOGPROBS // 21 // 4 + 1
    fields: dict[str, Any] = {"logprobs": 20, "echo": True, "max_tokens": 1}
    async with served(FakeGenerator(max_model_len=2 * num_tokens)) as api:
        async with api.complete(prompt=[IDS * num_tokens] * 4, **fields) as response:
            assert response.status == 400
        async with api.complete(prompt=[IDS * num_tokens] * 3, **fields) as response:
            assert response.status == 200


async def test_without_max_tokens_an_answer_ends_where_its_log_probabilities_would() -> None:
    generator = FakeGenerator(max_model_len=1 << 17)
    async with served(generator) as api:
        async with api.chat(n=2, logprobs=True, top_logprobs=20) as response:
            assert response.status == 200
        assert generator.last.request.sampling.max_tokens == MAX_LOGPROBS // (2 * 21)
        async with api.chat(n=2, logprobs=False) as response:
            assert response.status == 200
        assert generator.last.request.sampling.max_tokens > MAX_LOGPROBS // 4


async def test_long_work_of_several_calls_takes_turns() -> None:
    """However many calls have long work, one piece of it is done between two turns of the loop."""
    turns, done = WriteTurns(SystemClock(), num_per_turn=1), Counter[int]()
    turn = 0

    async def work(call: int) -> None:
        pieces = LongWork(turns)
        for _ in range(3):
            done[turn] += 1
            await pieces.did(PIECE)

    calls = [asyncio.create_task(work(call)) for call in range(5)]
    await asyncio.sleep(0)
    done.clear()  # the first pieces are due
    while not all(call.done() for call in calls):
        turn += 1
        await asyncio.sleep(0)
    assert sum(done.values()) == 5 * 2
    assert max(done.values()) == 1
