"""Converts conversation items to chat messages.

An assistant's reasoning, text and calls are separate items, but one chat message.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.api.read.chat import CalledFunction, Message, ToolCall
from coordinator.api.responses.compaction import SUMMARY_HEAD, summary_of
from coordinator.api.responses.items import (
    CallItem,
    CallOutputItem,
    CompactionItem,
    InputText,
    KeptItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)


def messages_of(items: Iterable[KeptItem]) -> list[Message]:
    """Return the chat messages; calls that were cut off are dropped, unless they have an output."""
    items = list(items)
    answered = {item.call_id for item in items if isinstance(item, CallOutputItem)}
    messages: list[Message] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _assistants(messages, item).content = _joined(item.content)
            case MessageItem():
                messages.append(Message(role=item.role, content=_joined(item.content)))
            case ReasoningItem():
                message = _assistants(messages, item)
                message.reasoning_content = (message.reasoning_content or "") + _joined(
                    item.content
                )
            case CallItem(status=status, call_id=i) if status == "completed" or i in answered:
                message = _assistants(messages, item)
                called = CalledFunction(name=item.name, arguments=item.arguments)
                call = ToolCall(id=item.call_id, function=called)
                message.tool_calls = [*(message.tool_calls or []), call]
            case CompactionItem(encrypted_content=content):
                told = f"{SUMMARY_HEAD}{summary_of(content, 'input')}"
                messages.append(Message(role="user", content=told))
            case CallOutputItem(output=output):
                text = output if isinstance(output, str) else _joined(output)
                messages.append(Message(role="tool", content=text, tool_call_id=item.call_id))
    return messages


def _assistants(messages: list[Message], item: KeptItem) -> Message:
    """Return the message to which an assistant's item belongs, after adding one if needed.

    A message is reasoning, then text, then calls: reasoning and text join only a message of just
    reasoning, and calls join any preceding assistant's message.
    """
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant":
        is_only_reasoning = last.content == "" and not last.tool_calls
        if is_only_reasoning or isinstance(item, CallItem):
            return last
    message = Message(role="assistant", content="")
    messages.append(message)
    return message


def _joined(parts: Iterable[InputText | OutputText | ReasoningText]) -> str:
    return "\n".join(part.text for part in parts)
