"""The official client library, unchanged: sync and async, streamed and whole, good and bad."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.cluster.client import MODEL
from tests.cluster.fleet import Fleet

MESSAGES: Any = [{"role": "user", "content": "Grüße! 你好 🙂"}]
LIMITS: Any = {"max_tokens": 20, "temperature": 0.9, "seed": 7, "extra_body": {"ignore_eos": True}}


@pytest_asyncio.fixture(loop_scope="session")
async def sdk(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    base = f"{fleet.url}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as sdk:
        yield sdk


async def in_thread(fleet: Fleet, call: Callable[[openai.OpenAI], Any]) -> Any:
    """The synchronous client, where it does not hold up the event loop."""

    def run() -> Any:
        with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as sdk:
            return call(sdk)

    return await asyncio.to_thread(run)


async def test_a_chat_is_the_same_whole_and_streamed(fleet: Fleet, sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, **LIMITS)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    text = whole.choices[0].message.content
    assert text

    stream = await sdk.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **LIMITS,
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == text
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )

    def streamed(sdk: openai.OpenAI) -> str:
        chunks = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **LIMITS)
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    def at_once(sdk: openai.OpenAI) -> str | None:
        answer = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, **LIMITS)
        return answer.choices[0].message.content

    assert await in_thread(fleet, streamed) == text
    assert await in_thread(fleet, at_once) == text


async def test_completions(fleet: Fleet, sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.completions.create(model=MODEL, prompt="Once upon", logprobs=2, **LIMITS)
    text = whole.choices[0].text
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 20

    several = await sdk.completions.create(model=MODEL, prompt=["Once upon", "Far away"], **LIMITS)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == text

    stream = await sdk.completions.create(model=MODEL, prompt="Once upon", stream=True, **LIMITS)
    assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == text

    def streamed(sdk: openai.OpenAI) -> str:
        chunks = sdk.completions.create(model=MODEL, prompt="Once upon", stream=True, **LIMITS)
        return "".join(c.choices[0].text for c in chunks if c.choices)

    assert await in_thread(fleet, streamed) == text


async def test_a_stop_string_ends_it(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.completions.create(model=MODEL, prompt=list(range(65, 90)), **LIMITS)
    text = whole.choices[0].text
    stop = next(char for char in text[3:] if char.isascii() and text.count(char) == 1)
    cut = await sdk.completions.create(
        model=MODEL, prompt=list(range(65, 90)), stop=[stop], **LIMITS
    )
    assert cut.choices[0].text == text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"


async def test_the_model_is_listed_and_found_by_name(fleet: Fleet, sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL
    assert await in_thread(fleet, lambda sdk: [m.id for m in sdk.models.list()]) == [MODEL]


async def test_errors_are_the_sdk_s_own(fleet: Fleet, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.chat.completions.create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        await sdk.completions.create(model=MODEL, prompt=[1] * 32768, max_tokens=1)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as too_hot:
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert too_hot.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await in_thread(fleet, lambda sdk: sdk.models.retrieve("other"))


async def test_hanging_up_on_a_stream(fleet: Fleet, sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.completions.create(
        model=MODEL, prompt="on and on", stream=True, **(LIMITS | {"max_tokens": 20_000})
    )
    async with stream:
        await anext(aiter(stream))
    await fleet.assert_baseline()
