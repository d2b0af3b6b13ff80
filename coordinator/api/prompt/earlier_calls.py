"""Earlier tool calls as chat templates take them, whatever clients send back of an answer."""

from __future__ import annotations

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


def template_id(call_id: str | None, tool_format: ToolFormat | None) -> str:
    """Return a call's id in the form that the model's template accepts."""
    return as_mistral_id(call_id or "") if tool_format is ToolFormat.MISTRAL else call_id or ""
