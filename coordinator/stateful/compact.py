"""POST /v1/responses/compact: summarises a long conversation, to continue from the summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from coordinator.api.answer import bodies
from coordinator.api.answer.call import CallPlan
from coordinator.api.answer.choice import ChoiceDelta
from coordinator.api.answer.formats import error_event
from coordinator.api.chat import plan_chat
from coordinator.api.read.ask import Ask
from coordinator.api.read.body import convert_request
from coordinator.api.read.terms import service_terms
from coordinator.api.responses.chat_request import in_our_words
from coordinator.api.responses.compaction import sealed, with_task
from coordinator.api.responses.input_items import check_items
from coordinator.api.responses.items import CompactionItem
from coordinator.api.responses.objects import CompactedResponse, response_usage
from coordinator.api.responses.requests import CompactRequest
from coordinator.stateful.asked import read_asked
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.stored import RESPONSE_ID
from coordinator.text.parts import AnswerParts
from pdserve.shared.errors import InvalidRequest


async def plan_compaction(ask: Ask, store: ResponseStore) -> CallPlan:
    """Plan the model's summary as one item. Nothing is stored. Raises RequestError."""
    values = ask.values
    check_items(values, "input")
    body = convert_request(values, CompactRequest)
    if body.input is None and body.previous_response_id is None:
        raise InvalidRequest("the request needs 'input', 'previous_response_id' or both", "input")
    values["input"] = with_task(values.get("input"))
    asked = await read_asked(ask, store)
    terms = service_terms(body, ask.headers, ask.context, ask.trace)
    answer_id = RESPONSE_ID.format(ask.trace.unique)

    with in_our_words():
        plan = await plan_chat(asked.chat(asked.items), asked.model, ask.context, terms, answer_id)
    return plan.call(CompactFormat(answer_id, plan.parts.make))


class CompactFormat:
    """Encodes the model's summary as one item. It is never streamed."""

    def __init__(self, answer_id: str, make_parts: Callable[[], AnswerParts]) -> None:
        self._id = answer_id
        self._make_parts = make_parts
        self._texts: list[str] = []

    def opening(self, index: int, usage: bodies.Usage | None) -> Sequence[bytes]:
        """No events: a summary is not streamed."""
        return []

    def chunk(self, delta: ChoiceDelta, usage: bodies.Usage | None) -> Sequence[bytes]:
        """No events: a summary is not streamed."""
        return []

    def text_template(self, index: int) -> None:
        """As AnswerFormat: nothing of it is streamed."""

    def closing(self, usage: bodies.Usage) -> Sequence[bytes]:
        """No events: a summary is not streamed."""
        return []

    def failure(self, error: bodies.ErrorDetail) -> bytes:
        """Return the error as an event."""
        return error_event(error)

    def take_in(self, delta: ChoiceDelta) -> None:
        """Keep the new text for the summary."""
        self._texts.append(delta.text)

    def whole(self, usage: bodies.Usage) -> bytes:
        """Return the summary as one item, without the model's reasoning."""
        parts = self._make_parts()
        summary = parts.push("".join(self._texts)).content + parts.finish().content
        item_id = f"cmp_{self._id.removeprefix('resp_')}_0"
        return msgspec.json.encode(
            CompactedResponse(
                id=self._id,
                created_at=int(time.time()),
                output=[CompactionItem(id=item_id, encrypted_content=sealed(summary.strip()))],
                usage=response_usage(usage, 0),
            )
        )
