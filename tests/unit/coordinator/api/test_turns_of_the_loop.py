"""The largest input of every endpoint is worked through in turns of the event loop that are short.

Work is counted, not timed: calls, objects that texts become, and ids that are looked at, each at
what it takes on an ordinary machine.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from coordinator.api import ApiConfig
from coordinator.api.embeddings.objects import MAX_INPUTS
from coordinator.api.prompt import parameter as prompts
from coordinator.api.read.chat import MAX_MESSAGES, MAX_PARTS
from coordinator.api.read.fields import MAX_ALLOWED_IDS, MAX_ANSWERS, MAX_CHOICES
from coordinator.api.read.json_text import MAX_CONTAINERS, MAX_ITEMS, MAX_MEMBERS
from coordinator.api.responses.requests import MAX_ITEMS as MAX_INPUT_ITEMS
from coordinator.api.routes import ROUTES
from coordinator.models.scoring import ScoringModel, YesNo
from coordinator.stateful import routes as stateful
from coordinator.stateful.socket_inbox import MAX_MESSAGE_BYTES
from pdserve import _native
from tests.fakes.generator import FakeGenerator
from tests.fakes.tokenizer import FakeTokenizer
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import served

MOST_S = 0.05
CALL_S, OBJECT_S, BYTE_S, ID_S, CHAR_S = 100e-9, 35e-9, 1e-9, 25e-9, 150e-9
CONTEXT = 32768
HI: dict[str, Any] = {"role": "user", "content": "Hi"}


class Turns:
    """The work of each turn of this thread's event loop."""

    def __init__(self) -> None:
        self.most_s = 0.0
        self.most_of = ""
        self._now_s = 0.0

    def tokenizer(self) -> FakeTokenizer:
        """One whose work counts."""

        def encoded(num_chars: int) -> None:
            try:
                asyncio.get_running_loop()
                self.add(num_chars * CHAR_S)
            except RuntimeError:
                assert num_chars <= 100 * CONTEXT, "in a thread, but not for ever"

        return FakeTokenizer(encoded, lambda num_ids: self.add(num_ids * ID_S))

    def add(self, seconds: float) -> None:
        self._now_s += seconds

    def run(self, handle: asyncio.Handle, run: Callable[[asyncio.Handle], None]) -> None:
        self._now_s = 0.0
        sys.setprofile(self._called)
        try:
            run(handle)
        finally:
            sys.setprofile(None)
        if self._now_s > self.most_s:
            self.most_s, self.most_of = self._now_s, repr(handle)

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self._now_s += CALL_S


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    counted = Turns()
    run, decode, is_ids = asyncio.events.Handle._run, msgspec.json.decode, prompts._is_ids

    def counted_decode(text: bytes, **how: Any) -> Any:
        *objects, _ = _native.json_shape(bytes(text)) if isinstance(text, bytes) else (0, 0)
        counted.add(sum(objects) * OBJECT_S + len(text) * BYTE_S)
        return decode(text, **how)

    def counted_ids(prompt: Any) -> bool:
        counted.add(len(prompt) * ID_S if isinstance(prompt, list) else 0)
        return is_ids(prompt)

    monkeypatch.setattr(asyncio.events.Handle, "_run", lambda handle: counted.run(handle, run))
    monkeypatch.setattr(msgspec.json, "decode", counted_decode)
    monkeypatch.setattr(prompts, "_is_ids", counted_ids)
    return counted


def chat(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [HI], **body}


def numbered(num: int, value: Any = 1) -> dict[str, Any]:
    return {f"x{i}": value for i in range(num)}


def tool(num: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": numbered(num, {"type": "string"})}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


MARGIN = 64  # for the rest of a body
IDS = [7] * ((MAX_ITEMS - MARGIN) // MAX_INPUTS - 1)
MANY = (MAX_ITEMS - MARGIN) // CONTEXT
TEXT = "Hello world, this is a small test. " * (CONTEXT // 16)
LARGE = "x" * (ApiConfig().max_body_bytes - 1024)
PARTS = [{"type": "input_text", "text": "x"}] * 1000
PARTS_OF_TEXT = [{"type": "text", "text": "x"}] * 4
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": chat(messages=[HI] * MAX_MESSAGES),
    "parts": chat(messages=[{**HI, "content": [{"type": "text", "text": "x"}] * MAX_PARTS}]),
    "a text": chat(messages=[{**HI, "content": LARGE}]),
    "tools": chat(tools=[tool(MAX_MEMBERS // 300)] * 128),
    "a schema": chat(
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {"type": "object", "properties": numbered(9000, {"type": "string"})},
            },
        }
    ),
    "variables": chat(chat_template_kwargs=numbered(MAX_MEMBERS - MARGIN)),
    "items": chat(chat_template_kwargs={"x": [1] * (MAX_ITEMS - MARGIN)}),
    "lists": chat(chat_template_kwargs={"x": [[]] * (MAX_CONTAINERS - MARGIN)}),
    "unknown names": chat(**numbered(MAX_MEMBERS - MARGIN)),
    "allowed ids": chat(allowed_token_ids=[7] * MAX_ALLOWED_IDS),
    "answers": chat(n=MAX_CHOICES),
    "choices": chat(structured_outputs={"choice": [f"a{i}" for i in range(MAX_ANSWERS)]}),
    "prompts of ids": ("/v1/completions", {"prompt": [[7] * (CONTEXT - 16)] * MANY}),
    "too many ids": ("/v1/completions", {"prompt": [[7] * (MAX_ITEMS - MARGIN)]}),
    "prompts": ("/v1/completions", {"prompt": [TEXT] * 2}),
    "inputs of ids": ("/v1/embeddings", {"input": [IDS] * MAX_INPUTS}),
    "inputs": ("/v1/embeddings", {"input": ["Hello world"] * MAX_INPUTS}),
    "a text to count": ("/tokenize", {"prompt": TEXT, "return_token_strs": True}),
    "ids to show": ("/detokenize", {"tokens": [7] * CONTEXT}),
    "too many ids to show": ("/detokenize", {"tokens": [7] * (MAX_ITEMS - MARGIN)}),
    "input items": ("/v1/responses", {"input": [HI] * MAX_INPUT_ITEMS}),
    "input items that do not fit": (
        "/v1/responses",
        {"input": [{**HI, "content": TEXT[:200]}] * 1000, "truncation": "auto"},
    ),
    "input items to count": ("/v1/responses/input_tokens", {"input": [HI] * MAX_INPUT_ITEMS}),
    "items to compact": ("/v1/responses/compact", {"input": [HI] * (MAX_INPUT_ITEMS - 1)}),
    "Anthropic's messages": (
        "/v1/messages",
        {"messages": [{**HI, "content": PARTS_OF_TEXT}] * (MAX_MESSAGES - 1), "max_tokens": 5},
    ),
    "messages to count": (
        "/v1/messages/count_tokens",
        {"messages": [HI] * (MAX_MESSAGES - 1)},
    ),
    **{
        f"documents of {path}": (path, {"query": "Q", "documents": ["Hello world"] * MAX_INPUTS})
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    },
    **{
        f"texts of {path}": (path, {"text_1": "Q", "text_2": ["Hello world"] * MAX_INPUTS})
        for path in ("/v1/score", "/score")
    },
    "a conversation": ("/v1/conversations", {"items": [{**HI, "content": PARTS}] * 20}),
}

# Of each way to read a body the case that takes most.
TELLING = {
    "tools",
    "a schema",
    "prompts of ids",
    "ids to show",
    "input items that do not fit",
}
JUDGE = ScoringModel(YesNo(50, 60))
REFUSED = {  # but only after all of it has been read
    "a text",
    "a schema",
    "tools",
    "unknown names",
    "too many ids",
    "too many ids to show",
}


@pytest.mark.parametrize("case", matrix(CASES, TELLING))
async def test_no_turn_does_more_than_a_little(case: str, turns: Turns) -> None:
    path, body = CASES[case]
    model = {} if path in ("/tokenize", "/detokenize", "/v1/conversations") else {"model": "alias"}
    raw = json.dumps(model | body).encode()
    generator = FakeGenerator(max_model_len=CONTEXT)
    async with served(generator, turns.tokenizer(), scoring=JUDGE) as api:
        status, told = await asyncio.to_thread(post, api.server.port, path, raw)
        assert status == (400 if case in REFUSED else 200), told
        assert b"lists and objects" not in told, "a larger input than is accepted"
        assert b"has more than" not in told, "a larger input than is accepted"
        assert b"too large" not in told
    assert turns.most_s < MOST_S, turns.most_of


async def test_no_turn_does_more_for_the_largest_message_of_a_websocket(turns: Turns) -> None:
    call = {"type": "response.create", "model": "alias", "input": ""}
    call["input"] = "x" * (MAX_MESSAGE_BYTES - len(json.dumps(call)) - 1)
    async with (
        served(FakeGenerator(max_model_len=CONTEXT), turns.tokenizer()) as api,
        api.client.ws_connect("/v1/responses") as socket,
        asyncio.timeout(20),
    ):
        await socket.send_str(json.dumps(call))
        assert (await socket.receive_json())["error"]["code"] == "context_length_exceeded"
    assert turns.most_s < MOST_S, turns.most_of


def test_every_endpoint_that_reads_a_body_is_among_these() -> None:
    posts = {route.path for route in (*ROUTES, *stateful.ROUTES) if route.method == "POST"}
    of_stored = {path for path in posts if "{" in path}  # read as those that create them
    assert posts - of_stored == {path for path, _ in CASES.values()}


def post(port: int, path: str, raw: bytes) -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        client.request("POST", path, raw, {"Content-Type": "application/json"})
        response = client.getresponse()
        return response.status, response.read()
    finally:
        client.close()
