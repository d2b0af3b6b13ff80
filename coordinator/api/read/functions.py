"""The deprecated function-calling parameters, translated to tools.

A request has `functions` and `function_call` instead of `tools` and `tool_choice`; an answer has
one `function_call`, without an id; its result is a message of role "function".
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from coordinator.api.read.requests import (
    ChatRequest,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)
from pdserve.errors import InvalidRequest


def with_functions_as_tools(body: ChatRequest) -> ChatRequest:
    """Return the request with functions as tools; `functions` is kept. Raises InvalidRequest."""
    chosen = body.function_call
    for name, value in (("tools", body.tools), ("tool_choice", body.tool_choice)):
        if value and (body.functions or chosen):
            ours = "functions" if body.functions else "function_call"
            raise InvalidRequest(f"{ours!r} and {name!r} cannot be combined", ours)
    names = [function.name for function in body.functions or []]
    if isinstance(chosen, NamedFunction) and chosen.name not in names:
        raise InvalidRequest(
            f"'function_call' names {chosen.name!r}, which is not one of 'functions'",
            "function_call",
        )
    if not body.functions:
        return body
    return structs.replace(
        body,
        tools=[Tool(type="function", function=function) for function in body.functions],
        tool_choice=NamedTool(function=chosen) if isinstance(chosen, NamedFunction) else chosen,
        parallel_tool_calls=False,
    )


def with_calls_of_tools(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with function calls as tool calls. Raises InvalidRequest."""
    told: list[Message] = []
    last_id: str | None = None  # id of the last call so far
    for i, message in enumerate(messages):
        if message.function_call is not None:
            if message.role != "assistant" or message.tool_calls:
                raise InvalidRequest(
                    f"messages[{i}] has 'function_call', which is allowed only in a message of the "
                    "assistant, and not beside 'tool_calls'",
                    f"messages[{i}].function_call",
                )
            last_id = f"call{i:05d}"  # nine letters and digits, as Mistral's templates require
            call = ToolCall(id=last_id, function=message.function_call)
            message = structs.replace(message, function_call=None, tool_calls=[call])
        elif message.role == "function":
            message = structs.replace(message, role="tool", tool_call_id=last_id)
        told.append(message)
    return told
