"""What the files of an ended batch say of each line: OpenAI's two files, or Anthropic's one."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from coordinator.jobs.line_run import LineAnswer
from coordinator.jobs.storage.batches import (
    AnsweredLine,
    Batch,
    Line,
    LineState,
    TokensUsed,
)

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


class _Cached(Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(Struct, frozen=True):
    """Token counts in the form of either protocol. Servers elsewhere also send null."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Cached | None = None
    cache_read_input_tokens: int | None = None  # not among `input_tokens`


class _Answer(Struct, frozen=True):
    usage: _Usage | None = None


class _Response(Struct, frozen=True):
    body: _Answer = _Answer()


class _Result(Struct, frozen=True):
    message: _Answer = _Answer()


class _Counted(Struct, frozen=True):
    response: _Response = _Response()
    result: _Result = _Result()


def add_used(used: TokensUsed, line: AnsweredLine) -> None:
    """Add what the answer of a line took."""
    if line.state is not LineState.SUCCEEDED:
        return
    counted = msgspec.json.decode(line.answer, type=_Counted)
    for usage in (counted.response.body.usage, counted.result.message.usage):
        if usage is None:
            continue
        outside = usage.cache_read_input_tokens or 0
        used.input += (usage.prompt_tokens or 0) + (usage.input_tokens or 0) + outside
        used.output += (usage.completion_tokens or 0) + (usage.output_tokens or 0)
        details = (usage.prompt_tokens_details, usage.input_tokens_details)
        used.cached += outside + sum((one and one.cached_tokens) or 0 for one in details)


def _output(batch: Batch, number: int, custom_id: str, response: LineResponse | None) -> OutputLine:
    return OutputLine(
        id=f"batch_req_{batch.id.removeprefix('batch_')}_{number}",
        custom_id=custom_id,
        response=response,
    )
