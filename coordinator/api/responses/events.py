"""The events of a streamed response. Sequence numbers are assigned when events are framed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from coordinator.api.answer.bodies import TokenLogprob
from coordinator.api.responses.items import Item, OutputText, ReasoningText
from coordinator.api.responses.objects import Response


class Event(Struct, kw_only=True, tag_field="type"):
    """Base of all events."""

    sequence_number: int = 0


class LifeEvent(Event, kw_only=True):
    """An event about the whole response."""

    response: Response


class Created(LifeEvent, tag="response.created"):
    """The response has begun: its first tokens have arrived, or it is queued in the background."""


class Queued(LifeEvent, tag="response.queued"):
    """The response will be generated in the background."""


class InProgress(LifeEvent, tag="response.in_progress"):
    """The response is being generated."""


class Completed(LifeEvent, tag="response.completed"):
    """The model finished the response."""


class Incomplete(LifeEvent, tag="response.incomplete"):
    """The response was cut off or cancelled."""


class Failed(LifeEvent, tag="response.failed"):
    """The response ended with an error."""


class ItemEvent(Event, kw_only=True):
    """An event about an item."""

    output_index: int
    item: Item


class ItemAdded(ItemEvent, tag="response.output_item.added"):
    """An item begins; it is still empty."""


class ItemDone(ItemEvent, tag="response.output_item.done"):
    """An item is finished; the event has all of it."""


class InItem(Event, kw_only=True):
    """An event about a position in an item."""

    item_id: str
    output_index: int


class InContent(InItem, kw_only=True):
    """An event about an item's content part; each item has only one."""

    content_index: int = 0


class PartEvent(InContent, kw_only=True):
    """An event about a whole content part."""

    part: OutputText | ReasoningText


class PartAdded(PartEvent, tag="response.content_part.added"):
    """A content part begins; it is still empty."""


class PartDone(PartEvent, tag="response.content_part.done"):
    """A content part is finished; the event has all of it."""


class TextDelta(InContent, kw_only=True, tag="response.output_text.delta"):
    """More of a message's text."""

    delta: str
    logprobs: list[TokenLogprob]


class TextDone(InContent, kw_only=True, tag="response.output_text.done"):
    """A message's whole text."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(InContent, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(InContent, kw_only=True, tag="response.reasoning_text.done"):
    """An item's whole reasoning."""

    text: str


class ArgumentsDelta(InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(InItem, kw_only=True, tag="response.function_call_arguments.done"):
    """A call's whole arguments."""

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


Frame = Callable[[bytes, str], bytes]  # (event as JSON, its type) |-> bytes on the wire


class Numbering:
    """Numbers the events of one stream."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._num_sent = 0

    def framed(self, event: Event) -> bytes:
        """Return an event as sent on the wire, with the next sequence number."""
        event.sequence_number = self._num_sent
        self._num_sent += 1
        return self._frame(msgspec.json.encode(event), str(event.__struct_config__.tag))
