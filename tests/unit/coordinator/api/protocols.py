"""The protocols in which a model is asked to say something: how each asks, answers and fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.generator import MODEL
from tests.matrix import matrix

HI = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True)
class Speech:
    """One protocol, by its path."""

    path: str
    body: dict[str, Any]
    text: Callable[[Any], str]  # of a whole answer
    delta: Callable[[Any], str]  # text in one event of a stream
    end: str  # in the last event of every stream that does not fail
    limit: str  # the parameter for the most tokens of an answer
    stops: str | None  # that for stop strings
    overloaded: int = 429  # status when the cluster has no room
    unavailable: int = 503  # and no node
    schema: Callable[[Any], dict[str, Any]] = field(default=lambda schema: {})  # asks for JSON

    def asked(self, **more: Any) -> dict[str, Any]:
        return {"model": MODEL, **self.body, **more}

    def is_error(self, body: Any) -> bool:
        """Whether it is an error object in the protocol's own form."""
        if self.path == "/v1/messages":
            return bool(body["type"] == "error" and body["request_id"]) and {
                "type",
                "message",
            } <= set(body["error"])
        return set(body["error"]) == {"message", "type", "param", "code"}


def _chat_delta(event: Any) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))


def _named_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


SPEECHES = (
    Speech(
        "/v1/messages",
        {"messages": HI, "max_tokens": 64},
        lambda whole: "".join(block["text"] for block in whole["content"]),
        lambda event: event.get("delta", {}).get("text", ""),
        'data: {"type":"message_stop"}',
        "max_tokens",
        "stop_sequences",
        overloaded=529,
        unavailable=529,
        schema=lambda schema: {
            "output_config": {"format": {"type": "json_schema", "schema": schema}}
        },
    ),
    Speech(
        "/v1/chat/completions",
        {"messages": HI},
        lambda whole: str(whole["choices"][0]["message"]["content"]),
        _chat_delta,
        "data: [DONE]",
        "max_tokens",
        "stop",
        schema=lambda schema: {"response_format": _named_format(schema)},
    ),
    Speech(
        "/v1/completions",
        {"prompt": "Hi", "max_tokens": 64},
        lambda whole: str(whole["choices"][0]["text"]),
        lambda event: "".join(choice["text"] for choice in event.get("choices", [])),
        "data: [DONE]",
        "max_tokens",
        "stop",
        schema=lambda schema: {"response_format": _named_format(schema)},
    ),
    Speech(
        "/v1/responses",
        {"input": "Hi"},
        lambda whole: "".join(item["content"][0]["text"] for item in whole["output"]),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        '"response.completed"',
        "max_output_tokens",
        "stop",
        schema=lambda schema: {
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        },
    ),
)
NAMES = [speech.path for speech in SPEECHES]
ALL = matrix(SPEECHES, 2)


def data_of(block: str) -> Any:
    """The JSON of an event; None for an end mark."""
    data = next(line for line in block.split("\n") if line.startswith("data: "))
    text = data.removeprefix("data: ")
    return None if text == "[DONE]" else json.loads(text)


def text_of(speech: Speech, blocks: list[str]) -> str:
    return "".join(speech.delta(data) for block in blocks if (data := data_of(block)) is not None)
