"""Conversation items: messages, reasoning, calls, call outputs and compactions."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from coordinator.api.answer.bodies import TokenLogprob
from coordinator.api.responses.requests import Role
from coordinator.text.parts import Phase

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(Struct, kw_only=True, tag_field="type", tag="input_text"):
    """Text that the model was given."""

    text: str


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text that the model wrote."""

    text: str = ""
    annotations: list[str] = []  # always empty
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Reasoning text."""

    text: str = ""


class MessageItem(Struct, kw_only=True, tag_field="type", tag="message"):
    """A message by the model or to the model."""

    id: str
    status: ItemStatus = "in_progress"
    role: Role = "assistant"
    content: list[OutputText | InputText] = []
    phase: Phase | UnsetType = UNSET  # of the model's, where its format tells


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[str] = []  # always empty: reasoning is not summarised
    content: list[ReasoningText] = []


class CallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function call by the model."""

    id: str
    call_id: str
    name: str
    arguments: str = ""  # JSON
    status: ItemStatus = "in_progress"


class CallOutputItem(Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """The output of a call, given to the model by the client."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: ItemStatus = "completed"


class CompactionItem(Struct, kw_only=True, tag_field="type", tag="compaction"):
    """A summary that replaces the conversation before it; opaque to clients."""

    id: str
    encrypted_content: str


Item = MessageItem | ReasoningItem | CallItem
KeptItem = Item | CallOutputItem | CompactionItem  # any item of a conversation
