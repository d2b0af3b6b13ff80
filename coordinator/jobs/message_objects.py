"""Anthropic's objects of message batches, and the body of their request."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct

from coordinator.jobs.lines import MAX_LINES
from coordinator.jobs.storage.batches import Batch, LineState


class BatchedMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """One request of a message batch."""

    custom_id: str
    # A createMessage request, which is read within the limits of one.
    params: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


class MessageBatchRequest(Struct, kw_only=True):
    """The body of POST /v1/messages/batches."""

    requests: Annotated[list[BatchedMessage], Meta(min_length=1, max_length=MAX_LINES)]


class MessageCounts(Struct, kw_only=True):
    """What became of the requests so far."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Struct, kw_only=True, tag_field="type", tag="message_batch"):
    """A message batch."""

    id: str
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


class MessageBatchPage(Struct, kw_only=True):
    """A page of message batches."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(Struct, kw_only=True, tag_field="type", tag="message_batch_deleted"):
    """The answer to DELETE /v1/messages/batches/{id}."""

    id: str


def message_batch(batch: Batch, counts: dict[int, int], results_url: str) -> MessageBatch:
    """Return a batch as clients see it, with the number of requests in each state."""
    is_cancelling = batch.status == "cancelling"
    known = {state: counts.get(state, 0) for state in LineState}
    return MessageBatch(
        id=batch.id,
        processing_status="ended"
        if batch.has_ended
        else ("canceling" if is_cancelling else "in_progress"),
        request_counts=MessageCounts(
            processing=known[LineState.LEFT],
            succeeded=known[LineState.SUCCEEDED],
            errored=known[LineState.ERRORED],
            canceled=known[LineState.CANCELED],
            expired=known[LineState.EXPIRED],
        ),
        created_at=_time(batch.created_at),
        expires_at=_time(batch.deadline_at),
        ended_at=_time_or_none(batch.document.ended_at),
        cancel_initiated_at=_time_or_none(batch.document.cancelling_at),
        results_url=results_url if batch.has_ended else None,
    )


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _time_or_none(seconds: int | None) -> str | None:
    return None if seconds is None else _time(seconds)
