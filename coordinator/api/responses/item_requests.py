"""Input items as clients send them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from coordinator.api.read.requests import MAX_MESSAGES, MAX_PARTS


class ItemPart(Struct, kw_only=True):
    """A part of an item's text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str | None = None


ItemText = str | Annotated[list[ItemPart], Meta(max_length=MAX_PARTS)]


Role = Literal["user", "assistant", "system", "developer"]
ItemType = Literal[
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "compaction",
    "item_reference",
]


class InputItem(Struct, kw_only=True):
    """An item of the input; which fields it needs depends on its type."""

    type: ItemType = "message"
    id: str | None = None  # of a reference: the item it refers to; else this item's own id
    role: Role | None = None  # of a message
    content: ItemText | None = None  # of a message, or of reasoning
    call_id: str | None = None  # of a call, and of its output
    name: str | None = None  # of a call
    arguments: str | None = None  # of a call, in JSON
    output: ItemText | None = None  # of a call's output
    encrypted_content: str | None = None  # of a compaction; ignored for reasoning


MAX_ITEMS = MAX_MESSAGES - 1  # leaves room for the message of instructions
Input = str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS)]
# To be summarised; leaves room for the item that asks for the summary.
LongInput = str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS - 1)]
