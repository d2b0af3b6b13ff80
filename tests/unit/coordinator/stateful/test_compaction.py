"""Conversations made short, and gone on with."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest

from coordinator.api.responses.requests import MAX_ITEMS
from tests.fakes.generator import MODEL, FakeGenerator, says, tool_tokenizer
from tests.unit.coordinator.api.harness import client_of, served, tail_of_prompt


async def test_the_model_sums_up_and_goes_on_from_that() -> None:
    generator = FakeGenerator(says("<think>Hm.</think>\nIt is Paris."))
    async with (
        served(generator, tool_tokenizer(), splits_reasoning=True) as api,
        client_of(api) as client,
    ):
        first = await client.responses.create(model=MODEL, input="Where?", store=True)
        made = await client.responses.compact(
            model=None, previous_response_id=first.id, input="So?", instructions="Brief."
        )
        asked = tail_of_prompt(api)
        assert asked.startswith(
            "<|system|>Brief.<|user|>Where?<|assistant|>It is Paris.<|user|>So?"
        )
        assert "Sum up our conversation" in asked
        assert (made.object, len(made.output)) == ("response.compaction", 1)
        assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
        (item,) = made.output
        items: Any = [item.model_dump(), {"role": "user", "content": "And now?"}]
        await client.responses.create(model=MODEL, input=items)
        prompt = tail_of_prompt(api)
        assert prompt.endswith("in short:\nIt is Paris.<|user|>And now?<|assistant|>")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/compact", {}, "input"),
        ("/compact", {"input": []}, "input"),
        ("/compact", {"input": "x", "stream": True}, "stream"),
        ("/compact", {"input": [{"role": "user"}]}, "input[0].content"),
        ("", {"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
        (
            "",
            {"input": [{"type": "compaction", "encrypted_content": "not ours"}]},
            "input[0].encrypted_content",
        ),
        (
            "",
            {
                "input": [
                    {
                        "type": "compaction",
                        "encrypted_content": base64.b64encode(b"\xff").decode(),
                    }
                ]
            },
            "input[0].encrypted_content",
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with (
        served() as api,
        api.client.post(f"/v1/responses{path}", json={"model": MODEL, **body}) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param
        assert api.generator.generations == []


async def test_as_many_items_as_there_can_be() -> None:
    """Instructions, and the task of summing up, are messages, too."""
    generator = FakeGenerator(says("Short."), max_model_len=2**20)
    item = {"role": "user", "content": "a"}
    async with served(generator, tool_tokenizer()) as api:
        for path, limit in (("/v1/responses", MAX_ITEMS), ("/v1/responses/compact", MAX_ITEMS - 1)):
            body = {"model": MODEL, "input": [item] * limit, "instructions": "Brief."}
            async with api.client.post(path, json=body) as response:
                assert response.status == 200, await response.text()
            body["input"] = [item] * (limit + 1)
            async with api.client.post(path, json=body) as response:
                error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "input")
            assert str(limit) in error["message"]
