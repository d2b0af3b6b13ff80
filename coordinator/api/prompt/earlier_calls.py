"""Earlier tool calls as chat templates take them, whatever clients send back of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from coordinator.api.read.arguments import read_arguments
from coordinator.api.read.chat import ToolCall
from coordinator.api.read.json_text import JsonReader
from coordinator.text.parts import ToolFormat
from coordinator.text.parts.call_ids import as_mistral_id


def template_call(
    call: ToolCall, reader: JsonReader, tool_format: ToolFormat | None
) -> dict[str, Any]:
    """Return a call for the template, which formats it for the model."""
    arguments = read_arguments(call.function.arguments, reader)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": template_id(call.id, tool_format), "type": "function", "function": function}


def one_by_one(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a template's messages with one call each, which is followed by its result.

    The templates of harmony write no second call of a message, and take a result for that of the
    call before it.
    """
    called: dict[str, Any] | None = None  # the last message with calls
    results: list[dict[str, Any]] = []
    for message in messages:
        if called is not None and message["role"] == "tool":
            results.append(message)
            continue
        if called is not None:
            yield from _paired(called, results)
        called, results = (message if message.get("tool_calls") else None), []
        if called is None:
            yield message
    if called is not None:
        yield from _paired(called, results)


def _paired(called: dict[str, Any], results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    of_call: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        of_call.setdefault(result.get("tool_call_id", ""), []).append(result)
    for number, call in enumerate(called["tool_calls"]):
        without = {"role": called["role"], "content": ""}
        yield (called if number == 0 else without) | {"tool_calls": [call]}
        yield from of_call.pop(call["id"], [])
    for rest in of_call.values():
        yield from rest


def template_id(call_id: str | None, tool_format: ToolFormat | None) -> str:
    """Return a call's id in the form that the model's template accepts."""
    return as_mistral_id(call_id or "") if tool_format is ToolFormat.MISTRAL else call_id or ""
