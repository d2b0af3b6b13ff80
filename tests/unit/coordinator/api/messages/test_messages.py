"""The Messages API: what its requests become, and what its answers and events look like."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.api.read.arguments import read_arguments
from coordinator.api.read.json_text import JsonReader
from tests.fakes.generator import FakeGenerator, Pause, Tokens, says, tool_tokenizer
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import Harness, prompt_of, served
from tests.unit.coordinator.api.protocols import HI, data_of

PATH = "/v1/messages"
BASE = {"model": "alias", "max_tokens": 300, "messages": HI}
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Bern"}}\n</tool_call>'
TOOL = {"name": "f", "description": "Look.", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"city": "Bern"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


async def whole(api: Harness, status: int = 200, **more: Any) -> Any:
    async with api.client.post(PATH, json=BASE | more) as response:
        assert response.status == status, await response.text()
        assert response.headers["request-id"] == response.headers["x-request-id"]
        return await response.json()


async def streamed(api: Harness, **more: Any) -> list[Any]:
    """The data of the events, whose names say their types."""
    async with api.client.post(PATH, json=BASE | more | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        blocks = (await response.text()).split("\n\n")[:-1]
    assert [block.partition("\n")[0] for block in blocks] == [
        f"event: {data_of(block)['type']}" for block in blocks
    ]
    return [data_of(block) for block in blocks]


def rebuilt(events: list[Any]) -> dict[str, Any]:
    """The message that a client makes of its events, which are in order."""
    first, ping, *inner, delta, stop = events
    assert (first["type"], ping, stop) == (
        "message_start",
        {"type": "ping"},
        {"type": "message_stop"},
    )
    message: dict[str, Any] = first["message"]
    assert message["content"] == []
    assert message["usage"]["output_tokens"] == 0
    grown: list[str] = []
    for event in inner:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            grown = []
            continue
        block = message["content"][-1]
        assert event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = read_arguments("".join(grown), JsonReader())
            continue
        kind, what = event["delta"].pop("type"), [*event["delta"]]
        if kind == "input_json_delta":
            grown.append(event["delta"]["partial_json"])
        else:
            block[what[0]] += event["delta"][what[0]]
    assert delta["type"] == "message_delta"
    return message | delta["delta"] | {"usage": delta["usage"]}


@pytest.mark.parametrize(
    ("answer", "kinds", "reason", "more"),
    [
        ("Hello world", ["text"], "end_turn", {}),
        ("<think>hm</think>Hello", ["thinking", "text"], "end_turn", {}),
        (f"<think>hm</think>Yes. {CALL}", ["thinking", "text", "tool_use"], "tool_use", {}),
        (CALL + CALL, ["tool_use", "tool_use"], "tool_use", {}),
        (CALL, ["tool_use"], "max_tokens", {"max_tokens": 40}),
        ("one two", ["text"], "stop_sequence", {"stop_sequences": ["x", " two"]}),
        ("Hello", [], "max_tokens", {"max_tokens": 0}),
        ("Hi " * 200, ["text"], "model_context_window_exceeded", {"max_tokens": 100_000}),
        ("<think>hm</think>", ["thinking"], "end_turn", {"thinking": {"type": "adaptive"}}),
        (
            "<think>hm</think>Hello",
            ["thinking", "text"],
            "end_turn",
            {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}},
        ),
    ],
)
async def test_a_message_and_its_events(
    answer: str, kinds: list[str], reason: str, more: dict[str, Any]
) -> None:
    generator = FakeGenerator(says(answer))
    async with served(generator, tool_tokenizer(), splits_reasoning=True) as api:
        made = await whole(api, tools=[TOOL], **more)
        again = rebuilt(await streamed(api, tools=[TOOL], **more))
    assert [block["type"] for block in made["content"]] == kinds
    assert (made["stop_reason"], made["type"], made["role"]) == (reason, "message", "assistant")
    assert made["stop_sequence"] == (" two" if reason == "stop_sequence" else None)
    ids = [block.pop("id", "") for m in (made, again) for block in m["content"]]
    assert made["content"] == again["content"]
    assert made | {"id": "", "content": []} == again | {"id": "", "content": []}
    assert len(set(ids)) in (len(ids), 1, 1 + 2 * kinds.count("tool_use"))
    usage, prompt = made["usage"], api.generator.last.request.prompt
    counts = usage["input_tokens"], usage["cache_read_input_tokens"]
    assert (sum(counts), counts[1] > 0) == (prompt.num_tokens, True)
    assert (usage["output_tokens_details"]["thinking_tokens"] > 0) == ("thinking" in kinds)


async def test_thinking_that_is_not_shown_comes_back_with_its_signature() -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    template = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}"
    generator = FakeGenerator(says("<think>hm, so</think>Hello"))
    async with served(generator, tool_tokenizer(template), splits_reasoning=True) as api:
        made = await whole(api, thinking=thinking)
        assert made["content"][0]["thinking"] == ""
        turns = [*HI, said(*made["content"], text("!")), user(text("and?"))]
        foreign = [{"type": "redacted_thinking", "data": "x"}]
        foreign += [{"type": "thinking", "thinking": "", "signature": "of another server"}]
        await whole(api, messages=[*turns, said(*foreign, text("Hm.")), user(text("so?"))])
    assert prompt_of(api) == "[]Hi[hm, so]Hello\n![]and?[]Hm.[]so?"


async def test_what_the_model_is_told() -> None:
    document = {"type": "document", "title": "Laws", "context": "old"}
    turns = [
        user(document | {"source": {"type": "text", "media_type": "text/plain", "data": "Be."}}),
        user(text("Read it.")),
        said({"type": "thinking", "thinking": "hm", "signature": "s"}, text("I look."), USE),
        user(
            RESULT | {"content": [text("sun"), text("wind")], "is_error": True},
            {
                "type": "search_result",
                "title": "T",
                "source": "https://a.example",
                "content": [text("found")],
                "citations": {"enabled": False},
            },
            text("And?"),
        ),
    ]
    system = [text("x-anthropic-billing-header: cc_version=1; cch=123;"), text("Be brief.")]
    async with served(tokenizer=tool_tokenizer()) as api:
        await whole(api, system=system, messages=turns, tools=[TOOL])
        told = prompt_of(api).partition("<|system|>")[2]
    assert told == (
        "Be brief.<|user|>Laws\nold\nBe.\nRead it.<|assistant|>I look.f(Bern)"
        "<|tool|>Error: sun\nwind<|user|>T\nhttps://a.example\nfound\nAnd?<|assistant|>"
    )


async def test_an_answer_goes_on_with_what_the_client_began() -> None:
    async with served(FakeGenerator(says(" world")), tool_tokenizer()) as api:
        made = await whole(api, messages=[*HI, {"role": "assistant", "content": "Hello"}])
        assert prompt_of(api).endswith("<|assistant|>Hello")
    assert made["content"] == [{"type": "text", "text": " world"}]


@pytest.mark.parametrize(
    ("choice", "calls", "single"),
    matrix(
        [
            ({"type": "any"}, True, False),
            ({"type": "tool", "name": "f", "disable_parallel_tool_use": True}, True, True),
            ({"type": "auto", "disable_parallel_tool_use": True}, False, True),
            ({"type": "none"}, False, False),
        ],
        1,
    ),
)
async def test_tool_choice(choice: dict[str, Any], calls: bool, single: bool) -> None:
    async with served(FakeGenerator(says(CALL + CALL)), tool_tokenizer()) as api:
        made = await whole(api, tools=[TOOL], tool_choice=choice)
        grammar = api.generator.last.request.sampling.grammar
    num_calls = [block["type"] for block in made["content"]].count("tool_use")
    assert (bool(grammar), num_calls) == (calls, 0 if choice["type"] == "none" else 2 - single)


@pytest.mark.parametrize(
    ("asked", "hints"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "between_tools"}}, {"enable_thinking": True}),
        ({"output_config": {"effort": "xhigh"}}, {"reasoning_effort": "xhigh"}),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
async def test_thinking_and_effort_are_for_the_template(
    asked: dict[str, Any], hints: dict[str, Any]
) -> None:
    template = "{{ messages[0].content }}|{{ enable_thinking }}|{{ reasoning_effort }}"
    async with served(tokenizer=tool_tokenizer(template)) as api:
        await whole(api, **asked)
        told = prompt_of(api).split("|")[1:]
    thinks, effort = hints.get("enable_thinking"), hints.get("reasoning_effort")
    assert told[0] == ("" if thinks is None and effort is None else str(thinks is not False))
    assert told[1] in (effort or "", "none" if thinks is False else "")


BILLING = {"role": "system", "content": [text("x-anthropic-billing-header: x")]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [*HI, said(text("So")), {"role": "user", "content": []}]}, "messages[2].content"),
    ({"messages": [BILLING]}, "'messages'"),
    ({"messages": [user({"type": "image", "source": {"type": "url"}})]}, "'image'"),
    ({"messages": [user({"type": "container_upload"})]}, "'container_upload'"),
    ({"messages": [user({"type": "document", "source": {"type": "base64"}})]}, "'base64'"),
    ({"messages": [user({"type": "document", "source": {"type": "file"}})]}, "'file'"),
    (
        {
            "messages": [
                user(
                    {
                        "type": "document",
                        "source": {"type": "text", "data": "x"},
                        "citations": {"enabled": True},
                    }
                )
            ]
        },
        "citations",
    ),
    ({"messages": [*HI, said(USE), user(RESULT | {"tool_use_id": "x"})]}, "'x'"),
    ({"messages": [*HI, said(USE), user(RESULT | {"content": [{"type": "image"}]})]}, "'image'"),
    ({"messages": [*HI, said({"type": "server_tool_use"})]}, "'server_tool_use'"),
    ({"messages": [*HI, said({"type": "tool_use", "name": "f", "input": {}})]}, "'id'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "'tool'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [{"name": "f"}]}, "'input_schema'"),
    ({"tools": [TOOL | {"input_schema": {"not": {}}, "strict": True}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "'tool_choice' is of type 'any', but"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "'name'"),
    ({"thinking": {"type": "enabled"}}, "'budget_tokens'"),
    ({"stop_sequences": [""]}, "'stop_sequences'"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "'not'"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "'container'"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": [user(text("x" * 9000))]}, "context length"),
]


@pytest.mark.parametrize(("wrong", "told"), matrix(REFUSED, 9))
async def test_what_would_change_the_answer_is_refused_by_name(
    wrong: dict[str, Any], told: str
) -> None:
    async with served(tokenizer=tool_tokenizer()) as api:
        body = await whole(api, 400, **wrong)
    assert body["error"]["type"] == "invalid_request_error"
    assert told in body["error"]["message"]
    assert api.generator.generations == []


async def test_what_does_not_change_the_answer_is_accepted() -> None:
    asked: dict[str, Any] = {
        "metadata": {"user_id": "u"},
        "service_tier": "standard_only",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "tools": [TOOL | {"cache_control": {}, "eager_input_streaming": True, "type": "custom"}],
        "mcp_servers": [],
        "speed": "fast",
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x,y"}
    async with (
        served(tokenizer=tool_tokenizer()) as api,
        api.client.post(f"{PATH}?beta=true", json=BASE | asked, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        assert (await response.json())["usage"]["service_tier"] == "priority"
        classes = api.server_context.classes
    assert api.generator.last.request.slo.priority == classes.highest.priority


async def test_tokens_are_counted_as_they_are_computed() -> None:
    asked = {"model": "alias", "messages": HI, "system": "Be brief.", "tools": [TOOL]}
    async with served(tokenizer=tool_tokenizer()) as api:
        async with api.client.post(f"{PATH}/count_tokens", json=asked) as response:
            counted = (await response.json())["input_tokens"]
        await whole(api, **asked)
        assert api.generator.last.request.prompt.num_tokens == counted
        wrong = asked | {"messages": [user({"type": "image"})]}
        async with api.client.post(f"{PATH}/count_tokens", json=wrong) as response:
            assert (response.status, (await response.json())["type"]) == (400, "error")


async def test_a_stream_without_tokens_is_kept_alive_by_pings() -> None:
    ids = tool_tokenizer().encode("Hello", add_special_tokens=False)
    generator = FakeGenerator(lambda _: [Tokens(ids[:1]), Pause(0.2), Tokens(ids, None)])
    async with (
        served(generator, keep_alive_s=0.02) as api,
        api.client.post(PATH, json=BASE | {"stream": True}) as response,
    ):
        await response.content.readuntil(b"content_block_delta")
        told = await response.content.readuntil(b"event: ping\n")
    assert told.endswith(b"event: ping\n")


async def test_models_are_listed_for_whom_asks() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    async with served() as api:
        async with api.client.get("/v1/models", headers=headers) as response:
            page = await response.json()
        assert [model["id"] for model in page["data"]] == ["org/tiny-model", "alias"]
        assert page["data"][0]["type"] == "model"
        assert page["data"][0]["created_at"].endswith("Z")
        assert (page["has_more"], page["last_id"]) == (False, "alias")
        for query, ids, more in (
            ("limit=1", ["org/tiny-model"], True),
            ("limit=1&after_id=org/tiny-model", ["alias"], False),
            ("limit=5&before_id=alias", ["org/tiny-model"], False),
        ):
            async with api.client.get(f"/v1/models?{query}", headers=headers) as response:
                page = await response.json()
            assert ([model["id"] for model in page["data"]], page["has_more"]) == (ids, more)
        for path, status in (("/v1/models?limit=0", 400), ("/v1/models/none", 404)):
            async with api.client.get(path, headers=headers) as response:
                assert (response.status, (await response.json())["type"]) == (status, "error")
        async with api.client.get("/v1/models") as response:
            assert (await response.json())["object"] == "list"
