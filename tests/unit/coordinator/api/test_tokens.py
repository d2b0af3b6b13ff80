"""/tokenize, /detokenize and /version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers

from coordinator.text import Tokenizer
from coordinator.text.threads import Asker, TextThreads
from pdserve import __version__
from pdserve.protocol import FinishReason
from tests.fakes.generator import EOS, MODEL, FakeGenerator, Tokens, tiny_tokenizer
from tests.unit.coordinator.api.harness import is_error_body, served
from tests.unit.coordinator.text import made_tokenizers as made

STOP = FinishReason.STOP
MESSAGES = [{"role": "user", "content": "Hi 你好"}]


async def test_a_text_goes_there_and_back() -> None:
    async with served() as api:
        async with api.client.post("/tokenize", json={"prompt": "naïve 😀"}) as response:
            found = await response.json()
        assert found["tokens"] == tiny_tokenizer().encode("naïve 😀", add_special_tokens=True)
        assert found["count"] == len(found["tokens"])
        assert found["max_model_len"] == 512
        assert found["token_strs"] is None
        async with api.client.post("/detokenize", json={"tokens": found["tokens"]}) as response:
            assert await response.json() == {"prompt": "<s>naïve 😀"}
    assert api.generator.generations == []


async def test_a_conversation_is_what_the_model_gets() -> None:
    async with served() as api:
        body = {"messages": MESSAGES, "model": MODEL, "return_token_strs": True}
        async with api.client.post("/tokenize", json=body) as response:
            found = await response.json()
        async with api.chat(messages=MESSAGES) as response:
            assert response.status == 200
    assert found["tokens"] == api.generator.last.request.prompt.token_ids
    assert len(found["token_strs"]) == found["count"]
    assert "".join(found["token_strs"]).startswith("<s><|user|>Hi")


async def test_strings_of_tokens_are_the_vocabularys_own() -> None:
    """As `convert_ids_to_tokens` has them: each names its token, also a part of a character."""
    prompt = "a 𓀀鬱"
    body = {"prompt": prompt, "return_token_strs": True}
    async with served() as api, api.client.post("/tokenize", json=body) as response:
        found = await response.json()
    strings = found["token_strs"]
    assert [tiny_tokenizer().token_id(string) for string in strings] == found["tokens"]
    assert not any("\N{REPLACEMENT CHARACTER}" in string for string in strings)
    assert len(strings) > len(prompt) + 1, "the characters are cut into bytes"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "x" * 10**6}, "prompt"),
        ("/tokenize", {"prompt": "x", "made_up": 1}, "made_up"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [100000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 513}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async with served() as api, api.client.post(path, json=body) as response:
        answer = await response.json()
    assert response.status in (400, 404)
    assert is_error_body(answer)
    assert answer["error"]["param"] == param


async def test_ids_without_a_token_are_taken_wherever_ids_are() -> None:
    """A model with padded embeddings samples them: what it said must be taken back."""
    last = tiny_tokenizer().num_ids + 15
    padded = Tokenizer(tokenizers.Tokenizer.from_str(made.byte_level_json()), num_ids=last + 1)
    model = FakeGenerator(script=lambda _: [Tokens([last, 80, last]), Tokens([EOS], STOP, EOS)])
    fields: list[dict[str, Any]] = [
        {"prompt": [last, 80]},
        {"prompt": [last], "echo": True, "logprobs": 1},
        {"logit_bias": {last: 5}},
        {"stop_token_ids": [last]},
        {"allowed_token_ids": [last]},
        {"logprobs": 1, "logprob_token_ids": [last]},
        {"stream": True, "return_token_ids": True},
    ]
    async with served(model, padded) as api:
        for body in fields:
            async with api.complete(**body) as response:
                assert response.status == 200, await response.text()
        async with api.complete(return_token_ids=True, logprobs=1) as response:
            choice = (await response.json())["choices"][0]
            assert choice["token_ids"][:3] == [last, 80, last]
            assert choice["text"] == padded.decode([80])
        async with api.embed(input=[last]) as response:
            assert response.status == 200, await response.text()
        async with api.client.post("/detokenize", json={"tokens": [last, 80]}) as response:
            assert await response.json() == {"prompt": padded.decode([80])}
        async with api.complete(prompt=[last + 1]) as response:
            assert response.status == 400


async def test_before_a_node_has_come_nothing_is_known() -> None:
    async with (
        served(FakeGenerator(max_model_len=None)) as api,
        api.client.post("/tokenize", json={"prompt": "x"}) as response,
    ):
        assert response.status == 503


async def test_the_version() -> None:
    async with served() as api, api.client.get("/version") as response:
        assert await response.json() == {"version": __version__}


async def test_special_tokens_and_the_template_can_be_asked_for() -> None:
    async with served() as api, api.client.get("/tokenizer_info") as response:
        info = await response.json()
    template = tiny_tokenizer().chat_template
    assert template is not None
    assert info["chat_template"] == template.source
    assert info["model_max_length"] == api.generator.max_model_len
    assert info["eos_token"] is None, "this tokenizer names none"


async def test_texts_that_are_only_counted_take_turns_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    payers: list[str] = []
    run = TextThreads.run

    async def seen(self: TextThreads, work: Callable[[], Any], asker: Asker) -> Any:
        payers.append(asker.payer)
        return await run(self, work, asker)

    monkeypatch.setattr(TextThreads, "run", seen)
    text, ids = "x" * 9000, [5] * 9000
    async with served(FakeGenerator(max_model_len=20_000)) as api:
        for path, body in [
            ("/tokenize", {"prompt": text}),
            ("/detokenize", {"tokens": ids}),
            ("/v1/responses/input_tokens", {"model": MODEL, "input": text}),
            ("/v1/completions", {"model": MODEL, "prompt": text}),
            ("/v1/chat/completions", {"model": MODEL, "messages": chat(text)}),
            ("/v1/embeddings", {"model": MODEL, "input": text}),
        ]:
            async with api.client.post(path, json=body) as response:
                assert response.status == 200, await response.text()
    assert payers == ["127.0.0.1 counts"] * 3 + ["127.0.0.1"] * 3


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
