"""What the files of an ended batch say of each line: OpenAI's two files, or Anthropic's one."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from coordinator.jobs.line_run import LineAnswer
from coordinator.jobs.storage.batches import AnsweredLine, Batch, Line, LineState

_REASONS = {
    LineState.EXPIRED: ("batch_expired", "this request was not run before the batch expired"),
    LineState.CANCELED: (
        "batch_cancelled",
        "this request was not run before the batch was cancelled",
    ),
}
_UNDONE = {LineState.EXPIRED: "expired", LineState.CANCELED: "canceled"}


class LineResponse(Struct, kw_only=True):
    """The answer to a line, as HTTP would have had it."""

    status_code: int
    request_id: str
    body: Raw


class OutputLine(Struct, kw_only=True):
    """A line of OpenAI's output file or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: dict[str, Any] | None = None


class ResultLine(Struct, kw_only=True):
    """A line of the results of a message batch."""

    custom_id: str
    result: dict[str, Any]


def answered(batch: Batch, line: Line, answer: LineAnswer) -> tuple[LineState, bytes]:
    """Return the state of a line that has its answer, and its line in the output."""
    state = LineState.SUCCEEDED if answer.is_good else LineState.ERRORED
    if batch.kind == "messages":
        kind, name = ("succeeded", "message") if answer.is_good else ("errored", "error")
        result = {"type": kind, name: Raw(answer.body)}
        return state, msgspec.json.encode(ResultLine(custom_id=line.custom_id, result=result))
    response = LineResponse(
        status_code=answer.status, request_id=answer.request_id, body=Raw(answer.body)
    )
    return state, msgspec.json.encode(_output(batch, line.number, line.custom_id, response))


def shown(batch: Batch, line: AnsweredLine) -> bytes:
    """Return the line of the output for an answered line, or one that will not be answered."""
    if line.answer:
        return line.answer
    if batch.kind == "messages":
        result: dict[str, Any] = {"type": _UNDONE[line.state]}
        return msgspec.json.encode(ResultLine(custom_id=line.custom_id, result=result))
    code, message = _REASONS[line.state]
    output = _output(batch, line.number, line.custom_id, None)
    output.error = {"code": code, "message": message}
    return msgspec.json.encode(output)


def _output(batch: Batch, number: int, custom_id: str, response: LineResponse | None) -> OutputLine:
    return OutputLine(
        id=f"batch_req_{batch.id.removeprefix('batch_')}_{number}",
        custom_id=custom_id,
        response=response,
    )
