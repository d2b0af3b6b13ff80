"""Builds the items of one answer as it arrives, and the events about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict

from msgspec import UNSET, structs

from coordinator.api.answer.bodies import TokenLogprob
from coordinator.api.responses import events
from coordinator.api.responses.items import (
    CallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from coordinator.text.parts import CallPiece, Phase


class _Place(TypedDict):
    """The position of the open item."""

    item_id: str
    output_index: int


class OutputItems:
    """The items of one answer. Content of another kind than the open item's ends that item.

    Args:
        unique: unique string from which item ids are made.
        make_call_id: makes ids of tool calls, in the form that the model's template accepts.
    """

    def __init__(self, unique: str, make_call_id: Callable[[int, CallPiece], str]) -> None:
        self.items: list[Item] = []
        self._unique = unique
        self._make_call_id = make_call_id
        self._text: list[str] = []  # of the open item
        self._logprobs: list[TokenLogprob] = []

    def add_reasoning(self, text: str) -> list[events.Event]:
        """Add reasoning text; return the events."""
        told: list[events.Event] = []
        item = self._open_item
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(id=self._id("rs"))
            told += self._begin(item)
            told.append(events.PartAdded(**self._place(item), part=ReasoningText()))
        self._text.append(text)
        return [*told, events.ReasoningDelta(**self._place(item), delta=text)]

    def add_text(
        self, text: str, logprobs: list[TokenLogprob], phase: Phase | None = None
    ) -> list[events.Event]:
        """Add message text, a message for each phase; return the events."""
        told: list[events.Event] = []
        item, own = self._open_item, UNSET if phase is None else phase
        if not isinstance(item, MessageItem) or item.phase != own:
            item = MessageItem(id=self._id("msg"), phase=own)
            told += self._begin(item)
            told.append(events.PartAdded(**self._place(item), part=OutputText()))
        self._text.append(text)
        self._logprobs += logprobs
        return [*told, events.TextDelta(**self._place(item), delta=text, logprobs=logprobs)]

    def add_call(self, piece: CallPiece) -> list[events.Event]:
        """Add a new call, or more of the last call's arguments; return the events."""
        told: list[events.Event] = []
        item = self._open_item
        if piece.name is not None or not isinstance(item, CallItem):
            call_id = self._make_call_id(0, piece)
            item = CallItem(id=self._id("fc"), call_id=call_id, name=piece.name or "")
            told += self._begin(item)
        if piece.arguments:
            self._text.append(piece.arguments)
            told.append(events.ArgumentsDelta(**self._place(item), delta=piece.arguments))
        return told

    def close(self, status: Literal["completed", "incomplete"]) -> list[events.Event]:
        """End the open item, if there is one; return the events."""
        item = self._open_item
        if item is None:
            return []
        item.status = status
        place, text = self._place(item), "".join(self._text)
        logprobs, self._text, self._logprobs = self._logprobs, [], []
        told: list[events.Event]
        match item:
            case CallItem():
                item.arguments = text
                told = [events.ArgumentsDone(**place, name=item.name, arguments=text)]
            case ReasoningItem():
                item.content = [ReasoningText(text=text)]
                told = [
                    events.ReasoningDone(**place, text=text),
                    events.PartDone(**place, part=item.content[0]),
                ]
            case MessageItem():
                said = OutputText(text=text, logprobs=logprobs)
                item.content = [said]
                told = [
                    events.TextDone(**place, text=text, logprobs=logprobs),
                    events.PartDone(**place, part=said),
                ]
        return [*told, events.ItemDone(output_index=len(self.items) - 1, item=item)]

    # ---- parts ---------------------------------------------------------------------------------

    @property
    def _open_item(self) -> Item | None:
        last = self.items[-1] if self.items else None
        return last if last is not None and last.status == "in_progress" else None

    def _begin(self, item: Item) -> list[events.Event]:
        told = self.close("completed")
        self.items.append(item)
        as_begun = structs.replace(item)  # a copy, as the item may change before the event is sent
        return [*told, events.ItemAdded(output_index=len(self.items) - 1, item=as_begun)]

    def _place(self, item: Item) -> _Place:
        return {"item_id": item.id, "output_index": len(self.items) - 1}

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._unique}_{len(self.items)}"
