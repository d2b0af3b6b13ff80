"""Translates a request of the Messages API to a chat, and chat's errors back to its parameters.

Chat decides what is supported: what chat refuses is refused here, too.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

from coordinator.api.messages.blocks import chat_messages
from coordinator.api.messages.requests import (
    ClientTool,
    ClientToolChoice,
    MessagesRequest,
    PromptFields,
)
from coordinator.api.read.body import convert_request
from coordinator.api.read.chat import ChatRequest, Message, checked
from coordinator.api.read.words import renamed
from pdserve.shared.errors import InvalidRequest

# chat parameter |-> ours
_OUR_WORDS = (
    (re.compile(r"^messages\b.*"), "messages"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_tokens"),
    (re.compile(r"^stop$"), "stop_sequences"),
    (re.compile(r"^response_format\.json_schema\b"), "output_config.format"),
    (re.compile(r"^(tools(?:\[\d+\])?)\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"^(tools(?:\[\d+\])?|tool_choice)\.function\b"), r"\1"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def in_our_words() -> AbstractContextManager[None]:
    """Translate errors raised within, so that they name parameters of the Messages API."""
    return renamed(_OUR_WORDS)


def chat_request(body: PromptFields) -> ChatRequest:
    """Return the chat for a body, without a limit of its tokens. Raises InvalidRequest."""
    messages = chat_messages(body.system, body.messages)
    values: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": _continues(messages[-1]) or None,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])] or None,
        "service_tier": "fast" if body.speed == "fast" else None,
        **_choice(body.tool_choice, has_tools=bool(body.tools)),
        **_thinking(body),
    }
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        values |= {name: getattr(body, name) for name in ("stream", "temperature", "top_p")}
        values |= {"top_k": body.top_k, "stop": body.stop_sequences}
    with in_our_words():
        values = {name: value for name, value in values.items() if value is not None}
        return checked(convert_request(values, ChatRequest))


def _continues(last: Message) -> bool:
    """Whether the answer goes on with the last message, which the client began."""
    return last.role == "assistant" and not last.tool_calls


def _thinking(body: PromptFields) -> dict[str, Any]:
    """Return chat's parameters for thinking. Without one, the model's template decides."""
    effort = None if body.output_config is None else body.output_config.effort
    if body.thinking is None:
        return {"reasoning_effort": effort}
    if body.thinking.type == "enabled" and body.thinking.budget_tokens is None:
        raise InvalidRequest("'thinking' needs 'budget_tokens'", "thinking.budget_tokens")
    thinks = body.thinking.type != "disabled"
    if effort is None and not thinks:
        return {"reasoning_effort": "none"}
    switches = {"enable_thinking": thinks, "thinking": thinks}  # names differ by checkpoint
    return {"reasoning_effort": effort, "chat_template_kwargs": switches}


def _tool(tool: ClientTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{where} is of type {tool.type[:128]!r}, which a server would have to carry out: this "
            "one takes only tools with an 'input_schema', of type 'custom'",
            f"{where}.type",
        )
    if tool.input_schema is None:
        raise InvalidRequest(f"{where} needs 'input_schema'", f"{where}.input_schema")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(choice: ClientToolChoice | None, *, has_tools: bool) -> dict[str, Any]:
    if choice is None:
        return {}
    if choice.type in ("any", "tool") and not has_tools:
        raise InvalidRequest(
            f"'tool_choice' is of type {choice.type!r}, but the request has no 'tools'",
            "tool_choice",
        )
    found: dict[str, Any] = {}
    if choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    if choice.type != "tool":
        return found | {"tool_choice": _CHOICES[choice.type]}
    if choice.name is None:
        raise InvalidRequest("'tool_choice' of type 'tool' needs 'name'", "tool_choice.name")
    return found | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
