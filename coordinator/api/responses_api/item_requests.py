"""Items as clients give them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from coordinator.api.requests import MAX_MESSAGES, MAX_PARTS


class ItemPart(Struct, kw_only=True):
    """A piece of an item's text."""

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
    """Something that was said or done; which fields it needs depends on its type."""

    type: ItemType = "message"
    id: str | None = None  # of an item that is referred to; else a name for this one
    role: Role | None = None  # of a message
    content: ItemText | None = None  # of a message, or of reasoning
    call_id: str | None = None  # of a call, and of its output
    name: str | None = None  # of a call, as are the
    arguments: str | None = None  # in JSON
    output: ItemText | None = None  # of a call's output
    encrypted_content: str | None = None  # of a compaction; of reasoning, it is not looked at


MAX_ITEMS = MAX_MESSAGES - 1  # instructions are a message, too
Input = str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS)]
LongInput = str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS - 1)]  # to be
# summed up, which is asked for by one more
