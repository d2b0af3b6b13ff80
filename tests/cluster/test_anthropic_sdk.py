"""Anthropic's client library, unchanged, of today or of old: whole and streamed, good and bad."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.client import MODEL
from tests.cluster.fleet import Fleet
from tests.sdks import anthropic

HI: Any = [{"role": "user", "content": "Grüße! 你好 🙂"}]
ASKED: Any = {"model": MODEL, "max_tokens": 20, "messages": HI}
SAMPLED: Any = {"extra_body": {"temperature": 0.0}}
Call = Callable[[Any], Any]


async def asked(fleet: Fleet, call: Call) -> Any:
    """Call with the synchronous client, where it does not hold up the event loop."""
    sdk = anthropic().Anthropic(base_url=fleet.url, api_key="none", max_retries=0)

    def run() -> Any:
        with sdk:
            return call(sdk)

    return await asyncio.to_thread(run)


async def test_a_message_is_the_same_whole_and_streamed(fleet: Fleet) -> None:
    whole = await asked(fleet, lambda sdk: sdk.messages.create(**ASKED, **SAMPLED))
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "max_tokens")
    assert whole.usage.output_tokens == 20
    text = whole.content[0].text

    def streamed(sdk: Any) -> Any:
        with sdk.messages.stream(**ASKED, **SAMPLED) as stream:
            said = "".join(stream.text_stream)
            return said, stream.get_final_message()

    said, message = await asked(fleet, streamed)
    assert said == message.content[0].text == text
    assert message.stop_reason == "max_tokens"
    counts = message.usage.input_tokens, message.usage.cache_read_input_tokens
    assert sum(counts) == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    of_loop = anthropic().AsyncAnthropic(base_url=fleet.url, api_key="none", max_retries=0)
    async with of_loop as sdk:
        assert (await sdk.messages.create(**ASKED, **SAMPLED)).content[0].text == text


async def test_a_prompt_alone_and_a_stop_sequence(fleet: Fleet) -> None:
    prompt = await asked(fleet, lambda sdk: sdk.messages.create(**(ASKED | {"max_tokens": 0})))
    assert (prompt.content, prompt.usage.output_tokens) == ([], 0)
    whole = await asked(fleet, lambda sdk: sdk.messages.create(**ASKED, **SAMPLED))
    text = whole.content[0].text
    stop = next(char for char in text[3:] if char.isascii() and char.strip())
    cut = await asked(
        fleet, lambda sdk: sdk.messages.create(**ASKED, stop_sequences=[stop], **SAMPLED)
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in cut.content) == text.partition(stop)[0]


async def test_errors_are_the_sdk_s_own(fleet: Fleet) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://a.example"}}
    for wrong, kind in (
        ({"model": "other"}, anthropic().NotFoundError),
        ({"messages": [{"role": "user", "content": [image]}]}, anthropic().BadRequestError),
    ):
        with pytest.raises(kind) as told:
            await asked(fleet, lambda sdk, wrong=wrong: sdk.messages.create(**(ASKED | wrong)))
        assert told.value.response.headers["request-id"]


async def test_hanging_up_on_a_stream(fleet: Fleet) -> None:
    def begun(sdk: Any) -> None:
        with sdk.messages.create(**(ASKED | {"max_tokens": 20_000, "stream": True})) as events:
            assert next(iter(events)).type == "message_start"

    await asked(fleet, begun)
    await fleet.assert_baseline()
