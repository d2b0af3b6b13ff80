"""What clients are told when something is wrong, and with which status."""

from __future__ import annotations

import json
import logging
from typing import Any

import openai
import pytest
import tokenizers

from coordinator.text import ChatTemplate, Tokenizer
from pdserve.shared import errors
from pdserve.shared.errors import PdserveError
from tests.fakes.generator import MODEL, FakeGenerator, Pause, Tokens, tiny_tokenizer
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import events_of, is_error_body, served
from tests.unit.coordinator.text import made_tokenizers as made

MESSAGES: Any = [{"role": "user", "content": "x"}]
TABLE: list[tuple[Exception, int, str]] = [
    (errors.InvalidRequest("no", "messages"), 400, "invalid_request"),
    (errors.ContextLengthExceeded("too long"), 400, "context_length_exceeded"),
    (errors.ModelNotFound("which?"), 404, "model_not_found"),
    (errors.Overloaded("full"), 429, "overloaded"),
    (errors.NodeLost("gone"), 502, "node_lost"),
    (errors.StaleIncarnation("of another life"), 502, "stale_incarnation"),
    (errors.UnusableLogits("not a number"), 500, "unusable_logits"),
    (errors.NoNodeAvailable("none"), 503, "no_node_available"),
    (errors.NodeDraining("leaving"), 503, "node_draining"),
    (errors.DeadlineExceeded("late"), 504, "deadline_exceeded"),
    (errors.StaleTicket("block 7"), 502, "stale_ticket"),
    (errors.OutOfBlocks("secret"), 500, "internal_error"),
    (PdserveError("secret"), 500, "internal_error"),
    (RuntimeError("secret"), 500, "internal_error"),
    (TimeoutError("secret"), 500, "internal_error"),
]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = "messages[0].tool_calls"
FUNCTION = {"type": "function", "function": {"name": "f", "cache_control": {"type": "ephemeral"}}}


@pytest.mark.parametrize(("error", "status", "code"), TABLE)
@pytest.mark.parametrize("stage", matrix(["start", "first", "whole"], 1))
async def test_errors_of_the_cluster(error: Exception, status: int, code: str, stage: str) -> None:
    generator = FakeGenerator(script=lambda _: [error])
    generator.start_error = error if stage == "start" else None
    async with served(generator) as api:
        async with api.chat(stream=stage != "whole") as response:
            body = await response.json()
        assert response.status == status
        assert is_error_body(body)
        assert body["error"]["code"] == code
        assert ("Retry-After" in response.headers) == (status in (429, 503))
        if code == "internal_error":
            assert "secret" not in json.dumps(body)
            assert response.headers["x-request-id"] in body["error"]["message"]
        assert api.observer.finished[-1].status == status
        assert api.observer.finished[-1].error_code == code


async def test_unexpected_errors_are_logged_with_the_request_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    generator = FakeGenerator(script=lambda _: [RuntimeError("a bug")])
    async with served(generator) as api, api.chat() as response:
        assert response.status == 500
    assert response.headers["x-request-id"] in caplog.text
    assert "a bug" in caplog.text


@pytest.mark.parametrize("error", [errors.NodeLost("gone"), RuntimeError("secret")])
async def test_errors_in_mid_stream(error: Exception) -> None:
    ids = tiny_tokenizer().encode("Hello", add_special_tokens=False)
    generator = FakeGenerator(script=lambda _: [Tokens(ids), Pause(0.02), error])
    async with served(generator) as api, api.chat(stream=True) as response:
        assert response.status == 200
        events = events_of(await response.read())
        assert is_error_body(events[-2])
        assert events[-1] == "data: [DONE]"
        assert "secret" not in json.dumps(events)
        assert events[-3]["choices"][0]["delta"]["content"] == "Hello"
        assert api.observer.finished[0].status in (500, 502)


async def test_the_sdk_sees_an_error_in_mid_stream() -> None:
    ids = tiny_tokenizer().encode("Hello", add_special_tokens=False)
    generator = FakeGenerator(script=lambda _: [Tokens(ids), Pause(0.02), errors.NodeLost("gone")])
    async with (
        served(generator) as api,
        openai.AsyncOpenAI(base_url=api.base_url, api_key="-") as client,
    ):
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in stream:
                pass


async def test_the_sdk_raises_its_own_classes() -> None:
    generator = FakeGenerator(start_error=errors.Overloaded("full"))
    async with (
        served(generator) as api,
        openai.AsyncOpenAI(base_url=api.base_url, api_key="-", max_retries=0) as client,
    ):
        with pytest.raises(openai.RateLimitError, match="full"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        with pytest.raises(openai.NotFoundError, match="no model"):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        with pytest.raises(openai.NotFoundError):
            await client.moderations.create(input="x")


async def test_no_node_yet() -> None:
    async with served(FakeGenerator(max_model_len=None)) as api, api.chat() as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "no_node_available"


@pytest.mark.parametrize(
    ("body", "param"),
    matrix(
        [
            ({"temperature": 2.1}, "temperature"),
            ({"temperature": "hot"}, "temperature"),
            ({"top_p": -0.1}, "top_p"),
            ({"presence_penalty": -2.5}, "presence_penalty"),
            ({"frequency_penalty": 3}, "frequency_penalty"),
            ({"logprobs": 1}, "logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
            ({"seed": "x"}, "seed"),
            ({"stop": ["a"] * 5}, "stop"),
            ({"stop": ""}, "stop"),
            ({"stop": ["a", ""]}, "stop"),
            ({"stop": "a" * 1025}, "stop"),
            ({"logit_bias": {f"{i:07}": 1 for i in range(1000)}}, "logit_bias"),
            ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
            ({"messages": [{"role": "user", "content": "x"}] * 16385}, "messages"),
            ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"logit_bias": {"²": 1}}, "logit_bias"),
            ({"logit_bias": {"100000": 1}}, "logit_bias"),
            ({"logit_bias": {"1": 101}}, "logit_bias"),
            ({"stop_token_ids": [100000]}, "stop_token_ids"),
            ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
            ({"n": 0}, "n"),
            ({"tools": [{"type": "function"}]}, "tools[0].function"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
            ({"response_format": {"type": "xml"}}, "response_format.type"),
            (
                {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
                "response_format.json_schema",
            ),
            (
                {
                    "messages": [{"role": "assistant", "content": "x" * 10_000}],
                    "continue_final_message": True,
                    "echo": True,
                    "n": 128,
                },
                "echo",
            ),
            ({"service_tier": "fastest"}, "service_tier"),
            ({"reasoning_effort": "some"}, "reasoning_effort"),
            ({"verbosity": "some"}, "verbosity"),
            ({"documents": [{"text": "x"}]}, "documents"),
            ({"modalities": ["text", "audio"]}, "modalities"),
            ({"audio": {}}, "audio"),
            ({"chat_template": "x"}, "chat_template"),
            ({"bad_words": [""]}, "bad_words[0]"),
            ({"bad_words": ["x"] * 129}, "bad_words"),
            ({"bad_words": [f"{i:03}" + "ß鬱" * 16 for i in range(128)]}, "bad_words"),
            ({"allowed_token_ids": []}, "allowed_token_ids"),
            ({"allowed_token_ids": [100000]}, "allowed_token_ids"),
            ({"stop_regex": "x"}, "stop_regex"),
            ({"kv_transfer_params": {}}, "kv_transfer_params"),
            ({"moderation": {"model": "x"}}, "moderation"),
            ({"web_search_options": {}}, "web_search_options"),
            ({"logprob_token_ids": [1]}, "logprob_token_ids"),
            ({"logprob_token_ids": [100000], "logprobs": True}, "logprob_token_ids"),
            ({"truncation_side": "middle"}, "truncation_side"),
            ({"made_up": 1}, "made_up"),
            ({"messages": []}, "messages"),
            ({"messages": "x"}, "messages"),
            ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, CALLS),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [FUNCTION, FUNCTION | {"stric": True}]}, "tools[1].stric"),
            (
                {"tools": [{"type": "function", "function": {"name": "f", "paramaters": {}}}]},
                "tools[0].function.paramaters",
            ),
            ({"functions": [{"name": "f", "paramaters": {}}]}, "functions[0].paramaters"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": "x", "made_up": 1}]}, "messages[0].made_up"),
            (
                {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
                "messages[0].tool_calls[0].function",
            ),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "messages[0].content[0]",
            ),
            (
                {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
                "messages[0].content[0].text",
            ),
            (
                {"continue_final_message": True, "add_generation_prompt": True},
                "continue_final_message",
            ),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            ({"cache_salt": ""}, "cache_salt"),
            ({"model": None}, "model"),
            ({"model": "other"}, "model"),
        ],
        16,
    ),
)
async def test_parameters_at_fault_are_named(body: dict[str, Any], param: str) -> None:
    async with served() as api, api.chat(**body) as response:
        answer = await response.json()
    assert response.status == (404 if body.get("model") else 400)
    assert is_error_body(answer)
    assert answer["error"]["param"] == param
    assert param.split(".")[-1].split("[")[0] in answer["error"]["message"]
    assert api.generator.generations == []


ROLES = "one of 'assistant', 'developer', 'function', 'system', 'tool', 'user'"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [{"role": "bot"}]}, f"must be {ROLES}, not 'bot'"),
        ({"tools": [{"type": "custom"}]}, "must be 'function', not 'custom'"),
        ({"tool_choice": "any"}, "must be one of 'auto', 'none', 'required', not 'any'"),
        ({"tool_choice": {"type": "x"}}, "must be one of 'function', 'allowed_tools', not 'x'"),
        ({"response_format": {"type": "x"}}, "'json_schema', 'text', not 'x'"),
        ({"service_tier": 3}, "expected `str | null`, got `int`"),
    ],
)
async def test_what_would_be_right_is_told(body: dict[str, Any], said: str) -> None:
    async with served() as api, api.chat(**body) as response:
        answer = await response.json()
    assert response.status == 400
    assert said in answer["error"]["message"]


async def test_neutral_and_ignored_parameters_are_accepted() -> None:
    body = {
        "n": 1,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "me",
        "client_metadata": {"a": "b"},
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "logit_bias": None,
        "stop": None,
        "functions": None,
        "made_up": None,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "Hello"},
        "reasoning_effort": "high",
        "verbosity": "low",
        "safety_identifier": "me",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "spaces_between_special_tokens": True,
        "include_reasoning": True,
        "separate_reasoning": True,
        "request_id": "r",
        "session_id": "s",
        "stream_interval": 4,
        "no_stop_trim": False,
        "bad_words": [],
        "top_p": 0,
    }
    async with served() as api, api.chat(**body) as response:
        assert response.status == 200


async def test_the_template_speaks_to_the_client() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    backend = tokenizers.Tokenizer.from_str(made.byte_level_json())
    tokenizer = Tokenizer(backend, chat_template=ChatTemplate(source))
    async with served(tokenizer=tokenizer) as api, api.chat() as response:
        assert response.status == 400
        assert "roles must alternate" in (await response.json())["error"]["message"]


async def test_a_model_without_a_chat_template() -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(made.byte_level_json()))
    async with served(tokenizer=tokenizer) as api:
        async with api.chat() as response:
            assert response.status == 400
            assert "no chat template" in (await response.json())["error"]["message"]
        async with api.complete() as response:
            assert response.status == 200


@pytest.mark.parametrize("depth", [100, 127, 128, 300, 900, 960, 990, 5000])
async def test_what_is_nested_too_deeply_is_refused_at_the_door(depth: int) -> None:
    """Near the depth that can just be read, what comes later would run out of stack."""
    deep = '{"a":' * depth + "1" + "}" * depth
    user = '[{"role": "user", "content": "x"}]'
    async with served() as api:
        for path, raw in {
            "/v1/chat/completions": f'{{"model":"{MODEL}","messages":{user},"metadata":{deep}}}',
            "/v1/responses": f'{{"model":"{MODEL}","input":"x","prompt_cache_options":{deep}}}',
            "/tokenize": f'{{"prompt":"x","metadata":{deep}}}',
        }.items():
            headers = {"Content-Type": "application/json"}
            async with api.client.post(path, data=raw, headers=headers) as response:
                body = await response.json()
            assert response.status == (200 if depth < 128 else 400)
            assert is_error_body(body) == (depth >= 128)


@pytest.mark.parametrize("depth", [800, 950, 990, 5000])
async def test_arguments_that_are_nested_too_deeply_are_no_fault_of_the_server(depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    async with served() as api, api.chat(messages=messages) as response:
        assert response.status == 200, "they may be a model's"


async def test_a_path_of_another_server_is_answered_with_what_to_use() -> None:
    """Ollama's, which many user interfaces ask for."""
    async with served() as api:
        for path, meant in (("/api/tags", "/v1/models"), ("/chat/completions", "/v1/chat/compl")):
            async with api.client.get(path) as response:
                answer = await response.json()
            assert response.status == 404
            assert is_error_body(answer)
            origin = f"http://127.0.0.1:{response.url.port}"
            assert f" {origin}{meant}" in answer["error"]["message"]
            assert f"{origin}/v1" in answer["error"]["message"]
