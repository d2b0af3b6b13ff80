"""The kinds of calls, each made from a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

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
class ChaosCall:
    """One call, the same whenever it is made."""

    kind: str
    number: int
    path: str
    body: Body
    leaves_after_s: float = 0.0  # the client goes away; 0: it does not
    key: str = ""  # with which the client comes back if its answer breaks; "": it does not

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.body.get("stream"))

    @property
    def is_in_background(self) -> bool:
        """Whether the answer is made without the client, which asks for it."""
        return bool(self.body.get("background"))


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


def _message(random: Random, number: int, **fields: Any) -> tuple[str, Body]:
    body = {"messages": [{"role": "user", "content": f"Tell me story {number}."}], **fields}
    return "/v1/messages", {**body, "max_tokens": 300}


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
    "background": lambda r, n: _response(r, n, seed=n, background=True, **_DRAWN),
    "message": lambda r, n: _message(r, n, temperature=0, stream=True),
    "short": lambda r, n: _chat(r, n, temperature=0, max_tokens=r.choice([1, 2])),
}


def name_for(number: int, names: Sequence[str]) -> str:
    """The model or adapter that calls of this number are for."""
    return names[number % len(names)]


def make_call(kind: str, number: int, names: Sequence[str]) -> ChaosCall:
    """The call of this kind and number, for one of these models and adapters."""
    random = Random(f"{kind} {number}")
    path, body = KINDS[kind](random, number)
    if body.get("stream") and path.endswith("completions"):
        body = {**body, "stream_options": {"include_usage": True}}
    return ChaosCall(kind, number, path, {"model": name_for(number, names), **body})
