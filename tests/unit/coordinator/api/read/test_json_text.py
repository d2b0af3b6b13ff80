"""Texts that would be made into too much are refused before they are."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.api import ApiConfig
from coordinator.api.read import json_text
from coordinator.api.read.body_budget import Body, BodyBudget
from coordinator.api.read.json_text import (
    MAX_CONTAINERS,
    MAX_ITEMS,
    MAX_MEMBERS,
    MAX_NESTING,
    JsonReader,
)
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import InvalidRequest
from tests.fakes.generator import MODEL, FakeGenerator
from tests.unit.coordinator.api.harness import is_error_body, served

TEXTS: list[tuple[str, int, Callable[[int], str]]] = [
    ("lists and objects", MAX_CONTAINERS, lambda n: "[" + ",".join(["{}"] * (n - 1)) + "]"),
    ("members", MAX_MEMBERS, lambda n: "{" + ",".join(['"a":1'] * n) + "}"),
    ("items", MAX_ITEMS, lambda n: "[" + ",".join(["1"] * (n + 1)) + "]"),
    ("nested deeper", MAX_NESTING, lambda n: "[" * n + "]" * n),
]


def a_body() -> Body:
    budget = BodyBudget(ApiConfig().max_buffered_bytes, ManualClock())
    return budget.body("somebody")


@pytest.mark.parametrize(("what", "limit", "text"), TEXTS)
async def test_what_a_text_becomes_is_held_and_the_most_that_it_may_become_has_room(
    what: str, limit: int, text: Callable[[int], str]
) -> None:
    raw, held = text(limit).encode(), a_body()
    tracemalloc.start()
    try:
        value = await JsonReader().read_long(raw, "it", held)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert value
    assert held.num_bytes > 0.8 * num_bytes


@pytest.mark.parametrize(
    "char", ["\N{GRINNING FACE}", r"\ud83d\ude00", "\N{SNOWMAN}", r"\u2603", "x"]
)
async def test_wide_characters_count_for_what_they_take(char: str) -> None:
    text = f'["{"x" * 2**20}{char}"]'.encode()
    held = a_body()
    value = await JsonReader().read_long(text, "it", held)
    assert len(value[0]) > 2**20
    assert held.num_bytes > 0.98 * sys.getsizeof(value[0])
    await a_body().take_most(2**60)  # what is more than a share waits until it is alone


async def test_the_largest_of_everything_has_room_in_a_payer_s_share() -> None:
    config = ApiConfig()
    most = (MAX_CONTAINERS, MAX_MEMBERS, MAX_ITEMS, MAX_NESTING)
    held = a_body()
    assert held.try_take(config.max_body_bytes)
    assert held.try_take(json_text.decoded_bytes(bytes(config.max_body_bytes), most))


@pytest.mark.parametrize(("what", "limit", "text"), TEXTS)
async def test_text_at_a_limit_is_read_and_beyond_it_refused(
    what: str, limit: int, text: Callable[[int], str]
) -> None:
    JsonReader().read(text(limit).encode(), "it")
    with pytest.raises(InvalidRequest, match=rf"^it (has|is).*{what}"):
        await JsonReader().read_long(text(limit + 1).encode(), "it", a_body())


def test_texts_that_belong_together_share_the_limits() -> None:
    reader = JsonReader()
    half = "{" + ",".join(['"a":1'] * (MAX_MEMBERS // 2)) + "}"
    reader.read(half.encode(), "a")
    reader.read(half.encode(), "b")
    with pytest.raises(InvalidRequest, match="c has more") as raised:
        reader.read(b'{"a":1}', "c", "c")
    assert raised.value.param == "c"


async def test_texts_within_texts_are_limited_too() -> None:
    """What a model may have written itself is shown as text then; anything else is refused."""
    much = "[" + ",".join(["[]"] * MAX_CONTAINERS) + "]"
    call = {"function": {"name": "f", "arguments": f'{{"a":{much}}}'}}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": f'{{"a":{much}}}'}
    user = {"role": "user", "content": "x"}
    async with served(FakeGenerator(max_model_len=10**7)) as api:
        for path, body in (
            ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [call]}, user]}),
            ("responses", {"input": [item]}),
        ):
            async with api.client.post(f"/v1/{path}", json={"model": MODEL} | body) as response:
                assert response.status == 200, await response.text()
        asked = {"model": MODEL, "prompt": "x", "guided_json": much}
        async with api.client.post("/v1/completions", json=asked) as response:
            error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == "guided_json"
    assert "lists and objects" in error["message"]


LONG = "x" * 100_000
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "body",
    [
        {LONG: 1},
        {"model": LONG},
        {"seed": LONG},
        {"slo_class": LONG},
        {"logit_bias": {LONG: 1}},
        {"messages": [{"role": LONG, "content": "x"}]},
        {"messages": [USER | {LONG: 1}]},
        {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
        {"chat_template_kwargs": {"messages": LONG}},
    ],
)
async def test_errors_repeat_little_of_what_was_sent(body: dict[str, Any]) -> None:
    async with served() as api, api.chat(**{"messages": [USER]} | body) as response:
        raw = await response.read()
    assert response.status in (400, 404)
    assert is_error_body(json.loads(raw))
    assert len(raw) < 3000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b" ", "it is empty"),
        (b'{"model": "x", "user": "a\xff"}', "not valid UTF-8: invalid start byte (byte 25)"),
        (rb'{"user": "cut \ud83d"}', "half of a surrogate pair (byte 14)"),
        (rb'{"user": "\ud83d\ude00', "not valid JSON: Input data was truncated"),
    ],
)
def test_what_is_wrong_with_a_text_is_told(text: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        JsonReader().read(text, "it")
    assert said in caught.value.message
