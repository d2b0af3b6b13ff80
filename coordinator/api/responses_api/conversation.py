"""Items of a conversation as chat messages.

What an assistant thinks, says and calls are items of their own here, and one message there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from coordinator.api.json_text import JsonReader
from coordinator.api.requests import MAX_MESSAGES, CalledFunction, Message, ToolCall
from coordinator.api.responses_api.requests import InputItem, ItemText
from pdserve.errors import InvalidRequest

_IGNORED = frozenset({"id", "status", "phase", "summary", "encrypted_content"})
_SERVED = frozenset(field.name for field in msgspec.structs.fields(InputItem)) | _IGNORED


def check_items(values: dict[str, Any]) -> None:
    """Refuse fields of items that would make a difference. Raises InvalidRequest."""
    items = values.get("input")
    for i, item in enumerate(items[:MAX_MESSAGES] if isinstance(items, list) else []):
        for name, value in item.items() if isinstance(item, dict) else ():
            if name not in _SERVED and value not in (None, []):
                where = f"input[{i}]"
                raise InvalidRequest(f"{name!r} is not supported in {where}", f"{where}.{name}")


def messages_of(given: str | Sequence[InputItem], earlier: Iterable[Message] = ()) -> list[Message]:
    """What follows the earlier messages. Raises InvalidRequest."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    made = _Messages(earlier)
    for i, item in enumerate(given):
        made.add(item, f"input[{i}]")
    return made.messages


class _Messages:
    def __init__(self, earlier: Iterable[Message]) -> None:
        self.messages: list[Message] = []
        self._reader = JsonReader()
        self._called = {call.id for message in earlier for call in message.tool_calls or []}

    def add(self, item: InputItem, where: str) -> None:
        match item.type:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                message = self._assistants(item)
                earlier = message.reasoning_content or ""
                message.reasoning_content = earlier + _text(item.content or "", "content", where)
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                self._add_output(item, where)

    def _add_message(self, item: InputItem, where: str) -> None:
        text = _text(item.content, "content", where)
        if item.role is None:
            raise _missing("role", where)
        if item.role == "assistant":
            self._assistants(item).content = text
        else:
            self.messages.append(Message(role=item.role, content=text))

    def _add_call(self, item: InputItem, where: str) -> None:
        call_id = _needed(item.call_id, "call_id", where)
        name = _needed(item.name, "name", where)
        arguments = _needed(item.arguments, "arguments", where)
        self._reader.read_object(arguments, f"{where}.arguments")
        message = self._assistants(item)
        called = CalledFunction(name=name, arguments=arguments)
        message.tool_calls = [*(message.tool_calls or []), ToolCall(id=call_id, function=called)]
        self._called.add(call_id)

    def _add_output(self, item: InputItem, where: str) -> None:
        call_id = _needed(item.call_id, "call_id", where)
        if call_id not in self._called:
            param = f"{where}.call_id"
            raise InvalidRequest(f"no call before it has the 'call_id' {call_id[:128]!r}", param)
        text = _text(item.output, "output", where)
        self.messages.append(Message(role="tool", content=text, tool_call_id=call_id))

    def _assistants(self, item: InputItem) -> Message:
        """The message that the item is part of: reasoning begins one, calls end one."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role == "assistant":
            is_only_reasoning = last.content == "" and not last.tool_calls
            if is_only_reasoning or item.type == "function_call":
                return last
        message = Message(role="assistant", content="")
        self.messages.append(message)
        return message


def _missing(name: str, where: str) -> InvalidRequest:
    return InvalidRequest(f"{where} has no {name!r}", f"{where}.{name}")


def _needed(value: str | None, name: str, where: str) -> str:
    if value is None:
        raise _missing(name, where)
    return value


def _text(text: ItemText | None, name: str, where: str) -> str:
    if text is None:
        raise _missing(name, where)
    if isinstance(text, str):
        return text
    parts = enumerate(text)
    return "\n".join(_needed(part.text, "text", f"{where}.{name}[{i}]") for i, part in parts)
