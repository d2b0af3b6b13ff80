"""The kinds of calls, each made from a number, and what a client hears of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Any, Final

import aiohttp
import msgspec

DEADLINE_S: Final = 120.0  # for a call to end in any way
_LOGPROBS: Final = 1000  # a choice's log-probabilities are compared like another choice
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 30},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 200}},
            "required": ["text"],
        },
    },
}

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One call, the same whenever it is made."""

    kind: str
    number: int
    path: str
    body: Body
    leaves_after_s: float = 0.0  # the client goes away; 0: it does not

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.body.get("stream"))


class Heard(msgspec.Struct):
    """What a client heard of one call."""

    kind: str
    number: int
    began_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    answers: dict[int, str] = {}  # by choice: everything that must be the same again, as text
    finish_reasons: dict[int, list[str]] = {}  # by choice; exactly one each
    completion_tokens: int | None = None
    num_ends: int = 0  # events that end the whole answer
    error: str = ""  # its code, or what broke
    has_left: bool = False
    heard_s: list[float] = []  # when something came

    def add(self, index: int, text: str) -> None:
        """Add a piece of a choice."""
        self.answers[index] = self.answers.get(index, "") + text


def _chat(random: Random, number: int, **fields: Any) -> tuple[str, Body]:
    topics = ("a fox and a hen", "the sea", "a king", "an old clock", "two friends")
    told = f"Tell me a long story about {random.choice(topics)}, number {number}. "
    message = told + "Then go on with it. " * random.choice([0, 0, 5, 40])
    body: Body = {"messages": [{"role": "user", "content": message}]}
    body = {**body, "max_tokens": 400, **fields}
    return "/v1/chat/completions", body


def _completion(random: Random, number: int, **fields: Any) -> tuple[str, Body]:
    prompt = f"Story {number}: once upon a time " + "there was a fox and " * random.randrange(30)
    return "/v1/completions", {"prompt": prompt, "max_tokens": 300, **fields}


def _response(random: Random, number: int, **fields: Any) -> tuple[str, Body]:
    body = {"input": f"Tell me story {number}.", "max_output_tokens": 300, **fields}
    return "/v1/responses", body


_LONG: Final = {"ignore_eos": True}
_DRAWN: Final = {"temperature": 0.9, "top_p": 0.95}
_JSON: Final = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}

Make = Callable[[Random, int], tuple[str, Body]]

KINDS: Final[dict[str, Make]] = {
    "greedy": lambda r, n: _chat(r, n, temperature=0, stream=True, **_LONG),
    "seeded": lambda r, n: _chat(r, n, seed=n, stream=True, **_DRAWN, **_LONG),
    "penalties": lambda r, n: _completion(
        r, n, seed=n, stream=True, frequency_penalty=0.7, presence_penalty=0.3, **_DRAWN, **_LONG
    ),
    "logprobs": lambda r, n: _chat(
        r, n, seed=n, stream=True, logprobs=True, top_logprobs=2, **_DRAWN, **_LONG
    ),
    "grammar": lambda r, n: _chat(r, n, seed=n, stream=True, response_format=_JSON, **_DRAWN),
    "tools": lambda r, n: _chat(
        r, n, seed=n, stream=True, tools=[_TOOL], tool_choice="required", **_DRAWN
    ),
    "four": lambda r, n: _chat(r, n, seed=n, n=4, stream=True, **_DRAWN, **_LONG),
    "stop": lambda r, n: _completion(
        r, n, seed=n, stop=["fox", "\n"], min_tokens=20, stream=True, **_DRAWN
    ),
    "unary": lambda r, n: _completion(r, n, seed=n, n=2, **_DRAWN, **_LONG),
    "response": lambda r, n: _response(r, n, seed=n, stream=True, **_DRAWN),
    "short": lambda r, n: _chat(r, n, temperature=0, max_tokens=r.choice([1, 2])),
}


def make_call(kind: str, number: int, model: str) -> Call:
    """The call of this kind and number."""
    random = Random(f"{kind} {number}")
    path, body = KINDS[kind](random, number)
    if body.get("stream") and path != "/v1/responses":
        body = {**body, "stream_options": {"include_usage": True}}
    return Call(kind, number, path, {"model": model, **body})


async def perform(session: aiohttp.ClientSession, url: str, call: Call) -> Heard:
    """Make a call, and hear its answer to the end, or until the client leaves."""
    heard = Heard(kind=call.kind, number=call.number, began_s=monotonic())
    limit_s = call.leaves_after_s or DEADLINE_S
    try:
        async with (
            asyncio.timeout(limit_s),
            session.post(url + call.path, json=call.body) as response,
        ):
            heard.status = response.status
            if response.status != 200 or not call.is_streamed:
                _take_whole(heard, await response.read())
            else:
                await _take_events(heard, response)
    except TimeoutError:
        heard.has_left = call.leaves_after_s > 0
        heard.error = "" if heard.has_left else "no end"
    except aiohttp.ClientError as error:
        heard.error = type(error).__name__
    heard.ended_s = monotonic()
    return heard


async def _take_events(heard: Heard, response: aiohttp.ClientResponse) -> None:
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        heard.heard_s.append(monotonic())
        data = line[5:].strip()
        if data == b"[DONE]":
            heard.num_ends += 1
            continue
        body = msgspec.json.decode(data)
        if body.get("error"):
            heard.error = _words(body["error"])
        elif "choices" in body:
            _take_choices(heard, body, "delta")
        else:
            _take_response_event(heard, body)


def _take_whole(heard: Heard, content: bytes) -> None:
    heard.heard_s.append(monotonic())
    body = msgspec.json.decode(content) if content else {}
    if heard.status != 200:
        heard.error = _words(body.get("error"))
        return
    _take_choices(heard, body, "message")
    heard.num_ends = 1 if body.get("choices") else 0


def _take_choices(heard: Heard, body: Body, part: str) -> None:
    for choice in body["choices"]:
        said = choice.get(part) or {}
        text = choice.get("text") or said.get("content") or ""
        for tool in said.get("tool_calls") or ():
            text += tool["function"].get("name", "") + tool["function"].get("arguments", "")
        for token in (choice.get("logprobs") or {}).get("content") or ():
            heard.add(_LOGPROBS + choice["index"], repr(token))
        heard.add(choice["index"], text)
        if choice.get("finish_reason"):
            heard.finish_reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    if body.get("usage"):
        heard.completion_tokens = body["usage"]["completion_tokens"]


def _take_response_event(heard: Heard, body: Body) -> None:
    kind = body.get("type", "")
    if kind == "response.output_text.delta":
        heard.add(0, body["delta"])
    elif kind in ("response.completed", "response.incomplete", "response.failed"):
        heard.num_ends += 1
        answer = body["response"]
        heard.finish_reasons.setdefault(0, []).append(kind)
        if answer.get("usage"):
            heard.completion_tokens = answer["usage"]["output_tokens"]
        if kind == "response.failed":
            heard.error = _words(answer.get("error"))
    elif kind == "error":
        heard.error = _words(body)


def _words(error: Body | None) -> str:
    return f"{error.get('code')}: {error.get('message')}" if error else "an error without words"
