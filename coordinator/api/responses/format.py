"""The format of a response, whole and as typed events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from coordinator.api.answer import bodies
from coordinator.api.answer.choice import ChoiceDelta, ScoredToken
from coordinator.api.answer.logprobs import TokenNames, chat_logprobs
from coordinator.api.answer.pieces import AnswerPieces, Piece
from coordinator.api.plan.generations import PartsPlan
from coordinator.api.responses import events
from coordinator.api.responses.items import Item
from coordinator.api.responses.objects import (
    IncompleteDetails,
    Response,
    ResponseError,
    response_usage,
)
from coordinator.api.responses.output import OutputItems
from coordinator.text import Tokenizer

Keep = Callable[[bytes, Sequence[Item]], None]  # takes a finished response and its items


class ItemsFormat:
    """Format of POST /v1/responses. See AnswerFormat.

    Args:
        response: the initial response; it is updated as the call proceeds.
        keep: called with the finished response, unless it failed or was cancelled.
        frame: encodes an event for the wire.
    """

    def __init__(
        self,
        response: Response,
        tokenizer: Tokenizer,
        plan: PartsPlan,
        keep: Keep,
        frame: events.Frame,
        *,
        shows_logprobs: bool,
    ) -> None:
        self._response = response
        self._names = TokenNames(tokenizer)
        self._keep = keep
        self._shows_logprobs = shows_logprobs
        self._pieces = AnswerPieces(plan.make())
        self._output = OutputItems(response.id.removeprefix("resp_"), plan.make_id)
        self._numbering = events.Numbering(frame)

    def queued(self) -> Sequence[bytes]:
        """Return the first events of a background response; the later ones are as usual."""
        response = self._response
        response.status = "queued"
        return self._framed([events.Created(response=response), events.Queued(response=response)])

    def opening(self, index: int, usage: bodies.Usage | None) -> Sequence[bytes]:
        """Return events with the response, still without items."""
        response = self._response
        told: list[events.Event] = [events.InProgress(response=response)]
        if response.status != "queued":
            told.insert(0, events.Created(response=response))
        response.status = "in_progress"
        return self._framed(told)

    def chunk(self, delta: ChoiceDelta, usage: bodies.Usage | None) -> Sequence[bytes]:
        """Return events for items that begin, grow or end."""
        return self._framed(self._take_in(delta))

    def text_template(self, index: int) -> None:
        """As AnswerFormat: what is around a text depends on what was before it."""

    def closing(self, usage: bodies.Usage) -> Sequence[bytes]:
        """Return the last event, with the whole response."""
        self._end(usage)
        response = self._response
        is_complete = response.status == "completed"
        end = events.Completed if is_complete else events.Incomplete
        return self._framed([end(response=response)])

    def failure(self, error: bodies.ErrorDetail) -> bytes:
        """Return the last event of a failed response: its items so far, and the error."""
        response = self._cut_off("failed")
        response.error = ResponseError(error.code or error.type, error.message)
        return self._numbering.framed(events.Failed(response=response))

    def cancelled(self) -> bytes:
        """Return the last event of a cancelled response, with its items so far."""
        return self._numbering.framed(events.Incomplete(response=self._cut_off("cancelled")))

    def body(self) -> bytes:
        """Return the current response as JSON; it has no items before it ends."""
        return msgspec.json.encode(self._response)

    def take_in(self, delta: ChoiceDelta) -> None:
        """Add new content to the whole response."""
        self._take_in(delta)

    def whole(self, usage: bodies.Usage) -> bytes:
        """Return the whole response as JSON."""
        return self._end(usage)

    # ---- parts ---------------------------------------------------------------------------------

    def _cut_off(self, status: Literal["failed", "cancelled"]) -> Response:
        self._output.close("incomplete")
        response = self._response
        response.output = self._output.items
        response.status = status
        return response

    def _take_in(self, delta: ChoiceDelta) -> list[events.Event]:
        told: list[events.Event] = []
        for piece in self._pieces.take_in(delta):
            told += self._add(piece)
        if delta.finish_reason is None:
            return told
        is_cut_off = delta.finish_reason == "length"
        if not self._output.items:
            told += self._output.add_text("", [])
        if is_cut_off:
            self._response.incomplete_details = IncompleteDetails()
        is_whole = not (is_cut_off or self._pieces.is_in_call)
        return told + self._output.close("completed" if is_whole else "incomplete")

    def _add(self, piece: Piece) -> list[events.Event]:
        told: list[events.Event] = []
        parts = piece.parts
        if parts.reasoning:
            told += self._output.add_reasoning(parts.reasoning)
        if parts.content:
            logprobs = self._logprobs(piece.tokens)
            told += self._output.add_text(parts.content, logprobs, parts.phase)
        for call in parts.calls:
            told += self._output.add_call(call)
        return told

    def _logprobs(self, tokens: list[ScoredToken]) -> list[bodies.TokenLogprob]:
        return chat_logprobs(tokens, self._names) if self._shows_logprobs else []

    def _end(self, usage: bodies.Usage) -> bytes:
        """Complete the response and pass it to `keep`; return it as JSON."""
        response = self._response
        response.output = self._output.items
        response.usage = response_usage(usage, self._pieces.num_reasoning_tokens)
        response.status = "completed"
        if response.incomplete_details is not None:
            response.status = "incomplete"
        else:
            response.completed_at = int(time.time())
        body = self.body()
        self._keep(body, response.output)
        return body

    def _framed(self, told: Sequence[events.Event]) -> list[bytes]:
        return [self._numbering.framed(event) for event in told]
