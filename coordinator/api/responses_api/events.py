"""The events of a streamed response. They are numbered when they are sent."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from coordinator.api.responses import TokenLogprob
from coordinator.api.responses_api.items import Item, OutputText, ReasoningText
from coordinator.api.responses_api.objects import Response


class Event(Struct, kw_only=True, tag_field="type"):
    """Any of them."""

    sequence_number: int = 0


class LifeEvent(Event, kw_only=True):
    """About the whole response."""

    response: Response


class Created(LifeEvent, tag="response.created"):
    """It has begun: its first tokens are there, or it is to be made in the background."""


class Queued(LifeEvent, tag="response.queued"):
    """It is to be made in the background."""


class InProgress(LifeEvent, tag="response.in_progress"):
    """It goes on."""


class Completed(LifeEvent, tag="response.completed"):
    """The model ended it."""


class Incomplete(LifeEvent, tag="response.incomplete"):
    """It was cut off, or cancelled."""


class Failed(LifeEvent, tag="response.failed"):
    """It ends with an error."""


class ItemEvent(Event, kw_only=True):
    """About an item."""

    output_index: int
    item: Item


class ItemAdded(ItemEvent, tag="response.output_item.added"):
    """It begins; still empty."""


class ItemDone(ItemEvent, tag="response.output_item.done"):
    """It is over; whole."""


class InItem(Event, kw_only=True):
    """About a place in an item."""

    item_id: str
    output_index: int


class InContent(InItem, kw_only=True):
    """About a part of an item's content: the only one."""

    content_index: int = 0


class PartEvent(InContent, kw_only=True):
    """About a whole part."""

    part: OutputText | ReasoningText


class PartAdded(PartEvent, tag="response.content_part.added"):
    """It begins; still empty."""


class PartDone(PartEvent, tag="response.content_part.done"):
    """It is over; whole."""


class TextDelta(InContent, kw_only=True, tag="response.output_text.delta"):
    """More of a message's text."""

    delta: str
    logprobs: list[TokenLogprob]


class TextDone(InContent, kw_only=True, tag="response.output_text.done"):
    """All of it."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(InContent, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(InContent, kw_only=True, tag="response.reasoning_text.done"):
    """All of it."""

    text: str


class ArgumentsDelta(InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(InItem, kw_only=True, tag="response.function_call_arguments.done"):
    """All of them."""

    name: str
    arguments: str


StreamEvent = (
    Created
    | Queued
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)


Frame = Callable[[bytes, str], bytes]  # an event as JSON, and its kind |-> as it is sent


class Numbering:
    """Of one stream's events."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._num_sent = 0

    def framed(self, event: Event) -> bytes:
        """As it is sent."""
        event.sequence_number = self._num_sent
        self._num_sent += 1
        return self._frame(msgspec.json.encode(event), str(event.__struct_config__.tag))
