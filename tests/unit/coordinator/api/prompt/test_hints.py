"""What templates are told besides messages and tools: how much to think and say, and documents."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.generator import tool_tokenizer
from tests.unit.coordinator.api.harness import prompt_of, served

TEMPLATE = (
    "{{ reasoning_effort | default('-') }}|{{ verbosity | default('-') }}|"
    "{{ enable_thinking | default('-') }}|"
    "{% for d in documents or [] %}{{ d.title }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({}, "-|-|-|"),
        ({"reasoning_effort": "high", "verbosity": "low"}, "high|low|True|"),
        ({"reasoning_effort": "none"}, "none|-|False|"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "none|-|True|",
        ),
        ({"documents": [{"title": "a"}, {"title": "b"}]}, "-|-|-|ab"),
    ],
)
async def test_the_template_is_told(body: dict[str, Any], prompt: str) -> None:
    async with served(None, tool_tokenizer(TEMPLATE)) as api, api.chat(**body) as response:
        assert response.status == 200
        assert prompt_of(api) == prompt


async def test_a_message_without_content_may_be_sent_back() -> None:
    """An answer has none if it is all reasoning; a client's own message must have some."""
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    for role, status in (("assistant", 200), ("user", 400), ("system", 400), ("tool", 400)):
        messages = [{"role": role, "content": None}, {"role": "user", "content": "x"}]
        async with (
            served(None, tool_tokenizer(source)) as api,
            api.chat(messages=messages) as response,
        ):
            assert response.status == status
            assert status == 400 or prompt_of(api) == "[][x]"


async def test_reasoning_is_told_by_either_name() -> None:
    source = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.reasoning }}]{% endfor %}"
    thought: Any = [
        {"role": "assistant", "content": "x", "reasoning_content": "one"},
        {"role": "assistant", "content": "x", "reasoning": "two"},
        {"role": "assistant", "content": "x", "reasoning_content": None, "reasoning": None},
    ]
    async with (
        served(None, tool_tokenizer(source)) as api,
        api.chat(messages=thought) as response,
    ):
        assert response.status == 200
        assert prompt_of(api) == "[one|one][two|two][|]"


async def test_what_was_refused_with_is_text_of_the_conversation() -> None:
    refused: Any = [
        {"role": "assistant", "content": None, "refusal": "I will not."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Nor this."}]},
    ]
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with (
        served(None, tool_tokenizer(source)) as api,
        api.chat(messages=refused) as response,
    ):
        assert response.status == 200
        assert prompt_of(api) == "I will not.Nor this."
