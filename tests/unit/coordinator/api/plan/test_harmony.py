"""Chats with gpt-oss: its channels in answers and streams, and what nodes are told to enforce."""

from __future__ import annotations

import pytest

from coordinator.text import Tokenizer
from coordinator.text.parts import ToolFormat
from coordinator.text.parts.harmony import MARKS
from pdserve.protocol import FinishReason
from tests.fakes.generator import EOS, FakeGenerator, Step, Tokens
from tests.unit.coordinator.api.harness import served
from tests.unit.coordinator.api.plan.test_structured import FORMAT, TOOLS, sent, takes, with_tokens

THOUGHT = "<|channel|>analysis<|message|>Hm, one?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'


def harmony_tokenizer() -> Tokenizer:
    return with_tokens(*MARKS)


async def test_channels_become_parts() -> None:
    tokenizer = harmony_tokenizer()
    ids = tokenizer.encode(THOUGHT + FINAL + "Yes, one.", add_special_tokens=False)
    steps: list[Step] = [Tokens([one]) for one in ids]
    generator = FakeGenerator(lambda _: [*steps, Tokens([EOS], FinishReason.STOP, EOS)])
    async with (
        served(generator, tokenizer, tool_format=ToolFormat.HARMONY) as api,
        api.chat() as response,
    ):
        answer = await response.json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm, one?"
    assert message["content"] == "Yes, one."
    num_thought = len(tokenizer.encode(THOUGHT.partition("<|start|>")[0], add_special_tokens=False))
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_thought


async def test_output_is_enforced_in_the_final_channel() -> None:
    tokenizer = harmony_tokenizer()
    async with served(None, tokenizer, tool_format=ToolFormat.HARMONY) as api:
        async with api.chat(response_format=FORMAT) as response:
            assert response.status == 200, await response.text()
        grammar = sent(api)
    good, bad = '{"x": 1}', '{"x": "1"}'
    for before in ("", THOUGHT, THOUGHT * 2):
        assert takes(grammar, before + FINAL + good, tokenizer)
        assert not takes(grammar, before + FINAL + bad, tokenizer)
        assert not takes(grammar, before + good, tokenizer)
    assert takes(grammar, f"<|channel|>final <|constrain|>JSON<|message|>{good}", tokenizer)


@pytest.mark.long
async def test_calls_are_enforced_in_the_commentary() -> None:
    tokenizer = harmony_tokenizer()
    async with served(None, tokenizer, tool_format=ToolFormat.HARMONY) as api:
        async with api.chat(tools=TOOLS, tool_choice="required") as response:
            assert response.status == 200, await response.text()
        required = sent(api)
        async with api.chat(tools=TOOLS, response_format=FORMAT) as response:
            assert response.status == 200, await response.text()
        either = sent(api)
    final = FINAL + '{"x": 2}'
    for before in ("", THOUGHT):
        assert takes(required, before + CALL, tokenizer)
        assert not takes(required, before + CALL.replace("1", '"1"'), tokenizer)
        assert not takes(required, before + CALL.replace(".f", ".h"), tokenizer)
        assert not takes(required, before + final, tokenizer)
        assert takes(either, before + CALL, tokenizer)
        assert takes(either, before + final, tokenizer)
