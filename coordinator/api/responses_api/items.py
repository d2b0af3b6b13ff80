"""Items of a conversation: what was said, thought and called."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from coordinator.api.responses import TokenLogprob
from coordinator.api.responses_api.item_requests import Role

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Struct, kw_only=True, tag_field="type", tag="input_text"):
    """Text that the model was given."""

    text: str


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text that the model wrote."""

    text: str = ""
    annotations: list[str] = []  # there never are any
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of reasoning."""

    text: str = ""


class MessageItem(Struct, kw_only=True, tag_field="type", tag="message"):
    """What the model says, or was told."""

    id: str
    status: ItemStatus = "in_progress"
    role: Role = "assistant"
    content: list[OutputText | InputText] = []


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thinks."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[str] = []  # it is not summed up
    content: list[ReasoningText] = []


class CallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function that the model calls."""

    id: str
    call_id: str
    name: str
    arguments: str = ""  # JSON
    status: ItemStatus = "in_progress"


class CallOutputItem(Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """What came of a call: for the model to read, never written by it."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: ItemStatus = "completed"


class CompactionItem(Struct, kw_only=True, tag_field="type", tag="compaction"):
    """What stands for all that was said before it: not for clients to read."""

    id: str
    encrypted_content: str


Item = MessageItem | ReasoningItem | CallItem
KeptItem = Item | CallOutputItem | CompactionItem  # of a conversation
