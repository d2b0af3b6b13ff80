"""Whatever a client sends, the fault is never the server's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.api.completions import CompletionRequest
from coordinator.api.read.body import IGNORED, NEUTRAL, field_names
from coordinator.api.read.chat import ChatRequest
from tests.fakes.generator import MODEL
from tests.matrix import examples
from tests.unit.coordinator.api.harness import served

NAMES = sorted(
    field_names(ChatRequest) | field_names(CompletionRequest) | set(NEUTRAL) | set(IGNORED)
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 600)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"])
contents = (
    st.text(max_size=20)
    | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=9)}))
    | values
)
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": contents}, optional={"name": values}),
    max_size=3,
)
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-1, 2),
    "max_tokens": st.integers(-1, 600),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
    "stream": st.booleans(),
    "logprobs": st.booleans() | st.integers(-1, 21),
    "top_logprobs": st.integers(-1, 21),
    "logit_bias": st.dictionaries(st.integers(-1, 500).map(str), st.floats(-110, 110), max_size=3),
    "seed": st.integers(-(2**65), 2**65),
    "messages": messages,
    "prompt": st.text(max_size=20) | st.lists(st.integers(-1, 500), max_size=5) | values,
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "chat_template_kwargs": st.dictionaries(st.text("abcz_", max_size=9), values, max_size=3),
    "top_k": st.integers(-2, 10**12),
    "min_tokens": st.integers(-1, 600),
    "stop_token_ids": st.lists(st.integers(-1, 500), max_size=4),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Valid at heart, with some fields replaced by plausible and some by absurd values."""
    text = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}
    base = {"model": MODEL} | draw(st.sampled_from([text, {}]))
    plausible = draw(st.lists(st.sampled_from(sorted(PLAUSIBLE)), unique=True, max_size=5))
    absurd = draw(st.lists(st.sampled_from(NAMES) | st.text(max_size=5), max_size=1))
    return (
        base
        | {name: draw(PLAUSIBLE[name]) for name in plausible}
        | {name: draw(values) for name in absurd}
    )


@pytest.fixture(scope="module")
def poster() -> Iterator[Any]:
    """Posts to a server that lives as long as the module; asserts what always holds."""
    with asyncio.Runner() as runner:
        serving = served(max_body_bytes=10**6)
        api = runner.run(serving.__aenter__())

        async def post(path: str, raw: bytes) -> int:
            headers = {"Content-Type": "application/json"}
            async with api.client.post(path, data=raw, headers=headers) as response:
                await check(response)
                return response.status

        yield lambda path, raw: runner.run(post(path, raw))
        assert {s.status // 100 for s in api.observer.finished} <= {2, 4}
        assert all(g.is_over or g.cancels for g in api.generator.generations)
        runner.run(serving.__aexit__(None, None, None))


async def check(response: aiohttp.ClientResponse) -> None:
    raw = await response.read()
    if response.status == 200:
        whole = response.content_type == "application/json"
        assert json.loads(raw)["choices"] if whole else raw.endswith(b"data: [DONE]\n\n")
    else:
        assert 400 <= response.status < 500
        error = json.loads(raw)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


NO_FIXTURE_CHECK = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=examples(60), suppress_health_check=NO_FIXTURE_CHECK)
@given(body=bodies(), chat=st.booleans())
def test_any_body_is_answered_or_refused_in_the_apis_form(
    poster: Any, body: dict[str, Any], chat: bool
) -> None:
    own = "prompt" if chat else "messages"  # the other endpoint's
    body = {name: value for name, value in body.items() if name != own}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    poster(path, json.dumps(body).encode())


@settings(max_examples=examples(50), suppress_health_check=NO_FIXTURE_CHECK)
@given(raw=st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_no_request_are_refused(poster: Any, raw: bytes) -> None:
    assert poster("/v1/chat/completions", raw) == 400
