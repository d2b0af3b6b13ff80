"""Validates a request's input items and converts them to conversation items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from coordinator.api.read.chat import MAX_MESSAGES, MAX_PARTS
from coordinator.api.responses.compaction import summary_of
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
from coordinator.api.responses.requests import InputItem, ItemPart, ItemText, Role
from pdserve.shared.errors import InvalidRequest

T = TypeVar("T")
Find = Callable[[str], KeptItem | None]  # item id |-> an item that is stored

_IGNORED = frozenset({"status", "phase", "summary"})
_NO_TEXT = ("input_image", "input_file", "input_audio", "computer_screenshot")
_SERVED = frozenset(field.name for field in msgspec.structs.fields(InputItem)) | _IGNORED


def check_items(values: dict[str, Any], param: str) -> None:
    """Refuse unsupported fields and parts of items that would have an effect.

    Raises InvalidRequest.
    """
    items = values.get(param)
    for i, item in enumerate(items[:MAX_MESSAGES] if isinstance(items, list) else []):
        for name, value in item.items() if isinstance(item, dict) else ():
            where = f"{param}[{i}]"
            if name not in _SERVED and value not in (None, []):
                raise InvalidRequest(f"{name!r} is not supported in {where}", f"{where}.{name}")
            if name in ("content", "output") and isinstance(value, list):
                _check_parts(value, f"{where}.{name}")


def _check_parts(parts: list[Any], where: str) -> None:
    for i, part in enumerate(parts[:MAX_PARTS]):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _NO_TEXT:
            param = f"{where}[{i}].type"
            raise InvalidRequest(
                f"{param!r} is of type {kind!r}, but this model takes only text", param
            )


def items_of(
    given: str | Sequence[InputItem],
    param: str,
    unique: str,
    called: set[str],
    find: Find,
) -> list[KeptItem]:
    """Convert the items given in parameter `param`; new ids are made from `unique`.

    `called` are the ids of calls that they follow; `find` finds what references refer to.

    Raises InvalidRequest.
    """
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    referred: set[str | None] = set()
    items: list[KeptItem] = []
    for i, one in enumerate(given):
        where = f"{param}[{i}]"
        if one.kind == "item_reference":
            _check_is_new(one.id, referred, where)
        item = _item(one, where, f"{unique}_in{i}", find)
        if isinstance(item, CallItem):
            called.add(item.call_id)
        elif isinstance(item, CallOutputItem) and item.call_id not in called:
            raise InvalidRequest(
                f"{where} is the output of {item.call_id[:128]!r}, but no earlier call has that "
                "'call_id'",
                f"{where}.call_id",
            )
        items.append(item)
    return items


def _check_is_new(item_id: str | None, referred: set[str | None], where: str) -> None:
    """Refuse a repeated reference: a short body could otherwise repeat a long item many times.

    Raises InvalidRequest.
    """
    if item_id in referred:
        raise InvalidRequest(
            f"{where} refers to item {str(item_id)[:128]!r} for the second time", f"{where}.id"
        )
    referred.add(item_id)


def _item(item: InputItem, where: str, unique: str, find: Find) -> KeptItem:
    match item.kind:
        case "message":
            return _message(item, where, item.id or f"msg_{unique}")
        case "reasoning":
            thoughts = [ReasoningText(text=text) for text in _texts(item.content or [], where)]
            return ReasoningItem(id=item.id or f"rs_{unique}", status="completed", content=thoughts)
        case "function_call":
            return CallItem(
                id=item.id or f"fc_{unique}",
                call_id=_needed(item.call_id, "call_id", where),
                name=_needed(item.name, "name", where),
                arguments=_needed(item.arguments, "arguments", where),
                status="completed",
            )
        case "function_call_output":
            output = _text(item.output, "output", where)
            return CallOutputItem(
                id=item.id or f"fco_{unique}",
                call_id=_needed(item.call_id, "call_id", where),
                output=output if isinstance(output, str) else _told(output, f"{where}.output"),
            )
        case "compaction":
            content = _needed(item.encrypted_content, "encrypted_content", where)
            summary_of(content, f"{where}.encrypted_content")
            return CompactionItem(id=item.id or f"cmp_{unique}", encrypted_content=content)
        case "item_reference":
            found = find(_needed(item.id, "id", where))
            if found is None:
                param = f"{where}.id"
                raise InvalidRequest(
                    f"there is no stored item with the 'id' {str(item.id)[:128]!r}", param
                )
            return found


def _message(item: InputItem, where: str, item_id: str) -> MessageItem:
    content = _text(item.content, "content", where)
    role: Role = _needed(item.role, "role", where)
    if role == "assistant":
        said = [OutputText(text=text) for text in _texts(content, where)]
        return MessageItem(id=item_id, status="completed", content=[*said])
    told = _told(content, f"{where}.content")
    return MessageItem(id=item_id, status="completed", role=role, content=[*told])


def _told(text: ItemText, where: str) -> list[InputText]:
    return [InputText(text=one) for one in _parts(text, where)]


def _texts(text: ItemText, where: str) -> list[str]:
    return _parts(text, f"{where}.content")


def _parts(text: ItemText, where: str) -> list[str]:
    if isinstance(text, str):
        return [text]
    return [_said(part, f"{where}[{i}]") for i, part in enumerate(text)]


def _said(part: ItemPart, where: str) -> str:
    if part.type == "refusal":
        return _needed(part.refusal, "refusal", where)
    return _needed(part.text, "text", where)


def _text(text: ItemText | None, name: str, where: str) -> ItemText:
    if text is None:
        raise _missing(name, where)
    return text


def _needed(value: T | None, name: str, where: str) -> T:
    if value is None:
        raise _missing(name, where)
    return value


def _missing(name: str, where: str) -> InvalidRequest:
    return InvalidRequest(f"{where} needs {name!r}", f"{where}.{name}")
