"""OpenAI's objects of files and batches, and bodies of their requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from coordinator.api.responses.objects import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
)
from coordinator.api.responses.requests import Metadata
from coordinator.jobs.storage.batches import Batch, LineFault, LineState, TokensUsed
from coordinator.jobs.storage.files import StoredFile

MIN_KEPT_S, MAX_KEPT_S = 3600, 30 * 86400


class FileShown(Struct, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(Struct, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileShown]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, kw_only=True):
    """The answer to DELETE /v1/files/{id}."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class ExpiresAfter(Struct, kw_only=True, forbid_unknown_fields=True):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_KEPT_S, le=MAX_KEPT_S)]


class BatchRequest(Struct, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class RequestCounts(Struct):
    """How many lines there are, and what became of them."""

    total: int
    completed: int
    failed: int


class Faults(Struct, kw_only=True):
    """What is wrong with lines of the input file."""

    object: Literal["list"] = "list"
    data: list[LineFault]


class BatchShown(Struct, kw_only=True):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: Faults | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    model: str | None  # that all lines name, once they are read
    usage: ResponseUsage | None  # of the answers, once it has ended
    metadata: dict[str, str] | None


class BatchList(Struct, kw_only=True):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchShown]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_shown(file: StoredFile) -> FileShown:
    """Return a file as clients see it."""
    return FileShown(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.name,
        purpose=file.purpose,
    )


def batch_shown(batch: Batch, counts: dict[int, int]) -> BatchShown:
    """Return a batch as clients see it, with the number of lines in each state."""
    document = batch.document
    ended: dict[str, Any] = {
        f"{status}_at": document.ended_at if batch.status == status else None
        for status in ("completed", "failed", "expired", "cancelled")
    }
    failed = sum(counts.get(s, 0) for s in (LineState.ERRORED, LineState.EXPIRED))
    return BatchShown(
        id=batch.id,
        endpoint=document.endpoint,
        errors=Faults(data=document.faults) if document.faults else None,
        input_file_id=document.input_file_id,
        completion_window=document.completion_window,
        status=batch.status,
        output_file_id=document.output_file_id,
        error_file_id=document.error_file_id,
        created_at=batch.created_at,
        in_progress_at=document.in_progress_at,
        expires_at=batch.deadline_at,
        finalizing_at=document.finalizing_at,
        cancelling_at=document.cancelling_at,
        request_counts=RequestCounts(document.total, counts.get(LineState.SUCCEEDED, 0), failed),
        model=document.model,
        usage=_usage(document.used) if batch.has_ended else None,
        metadata=document.metadata,
        **ended,
    )


def _usage(used: TokensUsed) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=used.input,
        input_tokens_details=InputTokensDetails(used.cached),
        output_tokens=used.output,
        output_tokens_details=OutputTokensDetails(0),
        total_tokens=used.input + used.output,
    )
