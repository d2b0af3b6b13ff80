"""Translates a Responses request to a chat request, and chat's errors back to its parameters.

Chat decides what is supported: what chat refuses is refused here, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from msgspec import structs

from coordinator.api.read.body import convert_request, field_names
from coordinator.api.read.chat import ChatRequest, Message, checked
from coordinator.api.read.words import renamed
from coordinator.api.responses.requests import (
    LOGPROBS,
    AllowedChoice,
    FunctionChoice,
    FunctionTool,
    ResponseRequest,
    TextConfig,
)
from pdserve.shared.errors import InvalidRequest

# Same name and meaning in both; other fields are translated, or do not concern chat.
_SAME = (field_names(ChatRequest) & field_names(ResponseRequest)) - {
    "stream",
    "stream_options",
    "tool_choice",
    "tools",
}
# chat parameter |-> Responses parameter
_OUR_WORDS = (
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^max_completion_tokens$"), "max_output_tokens"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^(tools(?:\[\d+\])?|tool_choice)\.function\b"), r"\1"),
)


def chat_request(body: ResponseRequest, messages: Sequence[Message]) -> ChatRequest:
    """Return the chat request for a body and its messages. Raises InvalidRequest."""
    shows_logprobs = LOGPROBS in (body.include or [])
    if body.top_logprobs and not shows_logprobs:
        raise InvalidRequest(
            f"'top_logprobs' needs 'include' to contain {LOGPROBS!r}", "top_logprobs"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true", "stream_options")
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    if body.instructions is not None:
        messages = [Message(role="system", content=body.instructions), *messages]
    values |= {
        "messages": list(messages),
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": shows_logprobs or None,
        "tools": [_tool(tool) for tool in body.tools or []] or None,
        "tool_choice": _choice(body),
        "response_format": _format(body.text),
        "verbosity": None if body.text is None else body.text.verbosity,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    values = {name: value for name, value in values.items() if value is not None}
    return checked(convert_request(values, ChatRequest))


def in_our_words() -> AbstractContextManager[None]:
    """Translate errors raised within, so that they name parameters of the Responses API."""
    return renamed(_OUR_WORDS)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = structs.asdict(tool)
    del function["type"]
    return {"type": "function", "function": function}


def _choice(body: ResponseRequest) -> Any:
    match body.tool_choice:
        case FunctionChoice() as named:
            return _named(named)
        case AllowedChoice(mode=mode, tools=tools):
            allowed = {"mode": mode, "tools": [_named(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return body.tool_choice


def _named(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    """Return chat's response_format, which nests the schema's fields one level deeper.

    Raises InvalidRequest.
    """
    wanted = None if text is None else text.format
    if wanted is None or wanted.type == "text":
        return None
    schema = {
        "name": wanted.name,
        "schema": wanted.schema_,
        "description": wanted.description,
        "strict": wanted.strict,
    }
    if wanted.type == "json_object":
        return {"type": wanted.type, "schema": wanted.schema_}
    for name in ("name", "schema"):
        if schema[name] is None:
            raise InvalidRequest(f"'text.format' needs {name!r}", f"text.format.{name}")
    return {"type": wanted.type, "json_schema": schema}
