"""The Responses API as the official SDK sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from coordinator.stateful.storage.store import ResponseStore
from pdserve.shared.errors import NodeLost, Overloaded
from tests.fakes.generator import (
    MODEL,
    FakeGenerator,
    Pause,
    Tokens,
    says,
    tiny_tokenizer,
    tool_tokenizer,
)
from tests.matrix import matrix
from tests.unit.coordinator.api.answer.test_tools import CALL
from tests.unit.coordinator.api.harness import (
    Harness,
    client_of,
    is_error_body,
    served,
    tail_of_prompt,
)

TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }
]


def post(api: Harness, **body: Any) -> Any:
    return api.client.post("/v1/responses", json={"model": MODEL, "input": "Hi", **body})


async def test_the_model_need_not_be_named() -> None:
    async with served() as api, client_of(api) as client:
        assert (await client.responses.create(input="Hi")).model == MODEL
        async with post(api, model=None) as response:
            assert (await response.json())["model"] == MODEL
        async with post(api, model="other") as response:
            assert response.status == 404


async def test_a_text_comes_whole() -> None:
    async with served() as api, client_of(api) as client:
        answer = await client.responses.create(
            model=MODEL,
            input="Hi",
            instructions="Be kind.",
            max_output_tokens=40,
            temperature=0.5,
            metadata={"a": "b"},
        )
        sampling = api.generator.last.request.sampling
    assert answer.output_text == "Hello world"
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.metadata == {"a": "b"}
    assert (answer.instructions, answer.temperature, answer.top_p) == ("Be kind.", 0.5, 1.0)
    (item,) = answer.output
    assert (item.type, item.status) == ("message", "completed")
    assert (sampling.max_tokens, sampling.temperature) == (40, 0.5)
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (
        usage.output_tokens
        == len(tiny_tokenizer().encode("Hello world", add_special_tokens=False)) + 1
    )
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens_details.reasoning_tokens == 0


async def test_what_is_cut_off_is_incomplete() -> None:
    async with served() as api, client_of(api) as client:
        answer = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
        stream = await client.responses.create(
            model=MODEL, input="Hi", max_output_tokens=2, stream=True
        )
        events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == answer.output_text


async def test_a_text_is_streamed_as_typed_events() -> None:
    async with served() as api, post(api, stream=True) as response:
        raw = await response.read()
    frames = raw.decode().split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    begun, added, done, ended = events[0], events[2], events[-2], events[-1]
    assert (begun["response"]["status"], begun["response"]["output"]) == ("in_progress", [])
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert done["item"]["content"][0]["text"] == "Hello world"
    assert ended["response"]["output"] == [done["item"]]
    assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == "Hello world"


@pytest.mark.parametrize("per_event", [1, 3, 1000])
async def test_the_sdk_puts_a_stream_together(per_event: int) -> None:
    script = says(f"<think>Hm, Paris.</think>I look.\n{CALL}{CALL}", per_event=per_event)
    async with (
        served(FakeGenerator(script), tool_tokenizer(), splits_reasoning=True) as api,
        client_of(api) as client,
    ):
        asked: Any = {"model": MODEL, "input": "Weather?", "tools": TOOLS}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    assert shapes(whole) == shapes(streamed)
    assert shapes(whole) == [
        ("reasoning", "Hm, Paris."),
        ("message", "I look."),
        ("weather", {"city": "Paris"}),
        ("weather", {"city": "Paris"}),
    ]
    arguments = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(text) for text in arguments] == 2 * [{"city": "Paris"}]
    calls = [item for item in whole.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == 2
    thought = tiny_tokenizer().encode("<think>Hm, Paris.</think>", add_special_tokens=False)
    for answer in (whole, streamed):
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == len(thought)


def shapes(response: Any) -> list[tuple[str, Any]]:
    """What there is in a response, without ids."""
    found: list[tuple[str, Any]] = []
    for item in response.output:
        assert item.status == "completed"
        if item.type == "function_call":
            found.append((item.name, json.loads(item.arguments)))
        else:
            found.append((item.type, item.content[0].text))
    return found


async def test_a_text_between_calls_has_its_place() -> None:
    for per_event in (1, 1000):
        script = says(f"A.{CALL}B.{CALL}", per_event=per_event)
        async with (
            served(FakeGenerator(script), tool_tokenizer()) as api,
            client_of(api) as client,
        ):
            answer = await client.responses.create(model=MODEL, input="Hi", tools=TOOLS)
        assert [name for name, _ in shapes(answer)] == ["message", "weather", "message", "weather"]


async def test_an_empty_answer_is_an_empty_message() -> None:
    async with served(FakeGenerator(says(""))) as api, client_of(api) as client:
        answer = await client.responses.create(model=MODEL, input="Hi")
    assert answer.output[0].type == "message"
    assert answer.output_text == ""


async def test_thought_that_never_ends_is_all_reasoning() -> None:
    generator = FakeGenerator(says("<think>Hm, Paris or not?"))
    async with served(generator, splits_reasoning=True) as api, client_of(api) as client:
        answer = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=9)
    assert [item.type for item in answer.output] == ["reasoning"]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 9


async def test_log_probabilities_are_those_of_the_text() -> None:
    generator = FakeGenerator(says(f"<think>Hm.</think>Yes{CALL}"))
    async with served(generator, tool_tokenizer(), splits_reasoning=True) as api:
        include = ["message.output_text.logprobs"]
        async with post(api, tools=TOOLS, include=include, top_logprobs=2) as response:
            body = await response.json()
        async with post(api, tools=TOOLS, include=include, stream=True) as response:
            events = [line for line in (await response.text()).splitlines() if "data: " in line]
        async with post(api) as response:
            assert (await response.json())["output"][1]["content"][0]["logprobs"] == []
    message = body["output"][1]
    assert message["type"] == "message"
    shown = message["content"][0]["logprobs"]
    assert "".join(token["token"] for token in shown) == "Yes"
    assert {len(token["top_logprobs"]) for token in shown} == {2}
    deltas = [json.loads(line[6:]) for line in events if "output_text.delta" in line]
    assert "".join(t["token"] for delta in deltas for t in delta["logprobs"]) == "Yes"


# ---- conversations -----------------------------------------------------------------------------


async def test_items_become_the_conversation() -> None:
    items: Any = [
        {"type": None, "role": "developer", "content": "Short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city": "Paris"}',
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "No.", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "Ask no more."},
            ],
        },
    ]
    async with served(None, tool_tokenizer()) as api, client_of(api) as client:
        await client.responses.create(model=MODEL, input=items, instructions="Polite.")
        assert tail_of_prompt(api) == (
            "<|system|>Polite.<|system|>Short.<|user|>Rain?<|assistant|>weather(Paris)"
            "<|tool|>Sunny.<|assistant|>No.\nAsk no more.<|assistant|>"
        )


async def test_an_answer_can_be_given_back_as_items() -> None:
    script = says(f"<think>Hm.</think>I look.\n{CALL}")
    async with (
        served(FakeGenerator(script), tool_tokenizer(), splits_reasoning=True) as api,
        client_of(api) as client,
    ):
        first = await client.responses.create(model=MODEL, input="Rain?", tools=TOOLS, store=False)
        call = first.output[-1]
        assert call.type == "function_call"
        items: Any = [
            {"role": "user", "content": "Rain?"},
            *[item.model_dump() for item in first.output],
            {"type": "function_call_output", "call_id": call.call_id, "output": "Dry."},
        ]
        await client.responses.create(model=MODEL, input=items)
        assert tail_of_prompt(api) == (
            "<|user|>Rain?<|assistant|>I look.weather(Paris)<|tool|>Dry.<|assistant|>"
        )


async def test_a_conversation_goes_on_from_a_response() -> None:
    async with (
        served(FakeGenerator(says(f"I look.\n{CALL}")), tool_tokenizer()) as api,
        client_of(api) as client,
    ):
        first = await client.responses.create(
            model=MODEL, input="Rain?", tools=TOOLS, instructions="Only now."
        )
        call = first.output[-1]
        assert call.type == "function_call"
        api.generator.script = says("Dry.")
        second = await client.responses.create(
            model=MODEL,
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "0 mm"}],
        )
        assert second.previous_response_id == first.id
        expected = "<|user|>Rain?<|assistant|>I look.weather(Paris)<|tool|>0 mm<|assistant|>"
        assert tail_of_prompt(api) == expected, "instructions hold for one response"
        await client.responses.delete(first.id)
        await client.responses.create(model=MODEL, previous_response_id=second.id, input="Ta!")
        assert tail_of_prompt(api) == f"{expected}Dry.<|user|>Ta!<|assistant|>"


async def test_a_stored_response_can_be_fetched_and_deleted() -> None:
    async with served() as api, client_of(api) as client:
        made = await client.responses.create(model=MODEL, input="Hi")
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        streamed = [event async for event in stream][-1]
        assert streamed.type == "response.completed"
        for response in (made, streamed.response):
            assert await client.responses.retrieve(response.id) == response
            await client.responses.delete(response.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(response.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(response.id)
            with pytest.raises(openai.NotFoundError) as refused:
                await client.responses.create(
                    model=MODEL, input="Hi", previous_response_id=response.id
                )
            assert refused.value.param == "previous_response_id"
            assert refused.value.code == "previous_response_not_found"


async def test_what_is_not_to_be_stored_is_not() -> None:
    async with served() as api, client_of(api) as client:
        answer = await client.responses.create(model=MODEL, input="Hi", store=False)
        assert answer.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)


async def test_old_ones_give_way() -> None:
    async with served(store=ResponseStore(max_responses=2)) as api, client_of(api) as client:
        made = [await client.responses.create(model=MODEL, input="Hi") for _ in range(2)]
        await client.responses.retrieve(made[0].id)
        await client.responses.create(model=MODEL, input="Hi")
        assert (await client.responses.retrieve(made[0].id)).id == made[0].id
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made[1].id)


async def test_the_input_can_be_listed_and_referred_to() -> None:
    async with served(None, tool_tokenizer()) as api, client_of(api) as client:
        first = await client.responses.create(model=MODEL, input="One")
        second = await client.responses.create(
            model=MODEL,
            previous_response_id=first.id,
            input=[{"role": "user", "content": "Two"}, {"role": "assistant", "content": "Three"}],
        )
        said = first.output[0].id
        pages = client.responses.input_items.list(second.id, order="asc", limit=3)
        items: list[Any] = [item async for item in pages]
        assert [item.content[0].text for item in items] == ["One", "Hello world", "Two", "Three"]
        assert [item.content[0].type for item in items[:2]] == ["input_text", "output_text"]
        newest = await client.responses.input_items.list(second.id, after=items[2].id)
        assert [item.id for item in newest.data] == [items[1].id, items[0].id]
        assert items[1].id == said
        referred: Any = [{"type": "item_reference", "id": items[2].id}, {"id": said}]
        await client.responses.create(model=MODEL, input=referred, store=False)
        expected = "<|user|>Two<|assistant|>Hello world"
        assert tail_of_prompt(api) == f"{expected}<|assistant|>"
        made = await client.responses.create(model=MODEL, input=referred)
        await client.responses.create(model=MODEL, previous_response_id=made.id)
        assert tail_of_prompt(api) == f"{expected}<|assistant|>Hello world<|assistant|>"


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=y", "after")],
)
async def test_a_page_that_cannot_be_is_refused(query: str, param: str) -> None:
    async with served() as api, client_of(api) as client:
        made = await client.responses.create(model=MODEL, input="Hi")
        url = f"/v1/responses/{made.id}/input_items?{query}"
        async with api.client.get(url) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param


async def test_input_is_counted_without_an_answer() -> None:
    async with served(None, tool_tokenizer()) as api, client_of(api) as client:
        counted = await client.responses.input_tokens.count(model=MODEL, input="Hi", tools=TOOLS)
        assert api.generator.generations == []
        answer = await client.responses.create(model=MODEL, input="Hi", tools=TOOLS)
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            await client.responses.cancel(answer.id)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


async def test_a_response_repeats_what_was_asked_for() -> None:
    asked = {
        "frequency_penalty": 0.5,
        "max_tool_calls": 3,
        "presence_penalty": -0.5,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "flex",
        "user": "u",
    }
    neutral: dict[str, Any] = dict.fromkeys(asked) | {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "service_tier": "default",
    }
    for body, expected in ((asked, asked), ({}, neutral)):
        async with served() as api, post(api, **body) as response:
            answer = await response.json()
        assert {name: answer[name] for name in asked} == expected


@pytest.mark.parametrize(
    ("effort", "told"),
    matrix([(None, "-"), ("none", "none, off"), ("low", "low"), ("max", "max")], 1),
)
async def test_effort_is_told_to_templates_that_know_it(effort: Any, told: str) -> None:
    knows = (
        "{{ reasoning_effort | default('-') }}{% if enable_thinking is false %}, off{% endif %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    for template, expected in ((knows, f"{told}Hi"), ("{{ messages[0].content }}", "Hi")):
        async with served(None, tool_tokenizer(template)) as api, client_of(api) as client:
            asked: Any = {"reasoning": {"effort": effort, "summary": "auto", "context": "auto"}}
            answer = await client.responses.create(model=MODEL, input="Hi", **asked)
            assert answer.reasoning is not None
            assert answer.reasoning.effort == effort
            assert tail_of_prompt(api) == expected


async def test_what_a_client_says_to_the_template_goes_first() -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }}"
    variables = {"enable_thinking": 7}
    async with (
        served(None, tool_tokenizer(template)) as api,
        post(api, reasoning={"effort": "low"}, chat_template_kwargs=variables) as response,
    ):
        assert response.status == 200
        assert tail_of_prompt(api) == "7 low"


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    matrix(
        [
            ({"input": None}, "input"),
            ({"input": []}, "input"),
            ({"input": 3}, "input"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
            ({"input": [{"type": "item_reference"}]}, "input[0].id"),
            ({"input": [{"role": "user"}]}, "input[0].content"),
            ({"input": [{"content": "x"}]}, "input[0].role"),
            ({"input": [{"role": "user", "content": "x", "audio": 1}]}, "input[0].audio"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
                "input[0].content[0].type",
            ),
            (
                {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
                "input[0].call_id",
            ),
            (
                {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
                "input[0].arguments",
            ),
            (
                {"input": [{"role": "user", "content": [{"type": "text"}]}]},
                "input[0].content[0].text",
            ),
            ({"background": True, "store": False}, "background"),
            ({"conversation": 3}, "conversation"),
            ({"prompt": {"id": "p"}}, "prompt"),
            ({"truncation": "middle"}, "truncation"),
            ({"access_programs": ["a"]}, "access_programs"),
            ({"background_options": {"priority": 1}}, "background_options"),
            ({"image": {"size": "auto"}}, "image"),
            ({"truncation": "auto", "input": "x" * 100_000}, "input"),
            ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
            ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"tools": [{"type": "function", "name": "no space"}]}, "tools[0].name"),
            ({"include": ["file_search_call.results"]}, "include[0]"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"stream_options": {}}, "stream_options"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"metadata": {"a" * 65: "x"}}, "metadata"),
            ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"min_tokens": 600}, "min_tokens"),
            ({"n": 2}, "n"),
            ({"messages": []}, "messages"),
            ({"input": "x" * 100_000}, "input"),
        ],
        8,
    ),
)
async def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with served(None, tool_tokenizer()) as api, post(api, **body) as response:
        answer = await response.json()
        assert response.status == 400
    assert is_error_body(answer)
    assert answer["error"]["param"] == param
    assert param.split(".")[-1].split("[")[0] in answer["error"]["message"]
    assert api.generator.generations == []


async def test_a_template_that_fails_is_a_fault_of_the_input() -> None:
    async with (
        served(None, tool_tokenizer("{{ raise_exception('No.') }}")) as api,
        post(api) as response,
    ):
        answer = await response.json()
        assert (response.status, answer["error"]["param"]) == (400, "input")


async def test_failures_before_the_first_token_have_a_status() -> None:
    for stream in (False, True):
        async with (
            served(FakeGenerator(start_error=Overloaded("busy", 3.0))) as api,
            post(api, stream=stream) as response,
        ):
            assert response.status == 429
            assert is_error_body(await response.json())


async def test_a_stream_that_fails_says_so() -> None:
    ids = tiny_tokenizer().encode("Hello", add_special_tokens=False)
    generator = FakeGenerator(lambda request: [Tokens(ids), NodeLost("decode-0 is gone")])
    async with served(generator) as api, client_of(api) as client:
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        events = [event async for event in stream]
        last = events[-1]
        assert last.type == "response.failed"
        assert last.sequence_number == len(events) - 1
        response: Response = last.response
        assert (response.status, response.output_text) == ("failed", "Hello")
        assert response.error is not None
        assert (response.error.code, response.error.message) == ("node_lost", "decode-0 is gone")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        async with post(api) as answer:
            assert answer.status == 502
    assert all(generation.is_over or generation.cancels for generation in api.generator.generations)


async def test_a_client_that_goes_away_ends_its_response() -> None:
    ids = tiny_tokenizer().encode("Hello", add_special_tokens=False)
    generator = FakeGenerator(lambda _: [Tokens(ids), Pause(until=asyncio.Event())])
    async with served(generator) as api:
        async with post(api, stream=True) as response:
            first = await response.content.readline()
            assert first == b"event: response.created\n"
            response.close()
        async with asyncio.timeout(30):
            await api.observer.over.wait()
        assert api.generator.last.cancels == ["client disconnected"]
        (summary,) = api.observer.finished
        assert summary.status == 499


async def test_terms_and_extensions_are_those_of_chat() -> None:
    async with (
        served() as api,
        post(api, slo_class="batch", seed=7, top_k=3, stop="or", cache_salt="s") as response,
    ):
        body = await response.json()
        request = api.generator.last.request
    assert body["output"][0]["content"][0]["text"] == "Hello w"
    assert (request.slo.name, request.prompt.cache_salt) == ("batch", "s")
    assert (request.sampling.seed, request.sampling.top_k) == (7, 3)
    assert [summary.endpoint for summary in api.observer.finished] == ["/v1/responses"]
