"""Reads the lines of an input file, and says what is wrong with them."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from coordinator.api.read.json_text import JsonReader
from coordinator.jobs.storage.batches import PIECE, Line, LineFault
from pdserve.shared.errors import InvalidRequest

MAX_LINES = 50_000
MAX_FAULTS = 100  # told of one file
MAX_ID_CHARS = 512
_MAX_EMPTY = MAX_LINES  # empty ones besides
_PREFIX_BYTES = 512
_NOT_YOURS = ("slo_class", "priority")  # lines run in the lowest class of their tenant's
_FIRST = ("system", "instructions", "tools")  # what prompts begin with, and then
_THEN = ("messages", "prompt", "input")


class InputLine(msgspec.Struct, kw_only=True):
    """One line of an input file."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class Faulty(Exception):  # told with the line's number, by whoever reads it
    """A line cannot be a request."""

    def __init__(self, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param


class LineReader:
    """The lines of one input file; faults are collected."""

    def __init__(self, endpoint: str, max_body_bytes: int) -> None:
        self.num_lines = 0
        self.faults: list[LineFault] = []
        self.models: set[str | None] = set()  # that lines name; no more than two
        self._endpoint = endpoint
        self._max_body_bytes = max_body_bytes
        self._ids: set[str] = set()
        self._number = 0  # of the line, from 1, with empty ones

    async def read(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[list[Line]]:
        """Yield good lines, some at a time, up to what makes the file faulty."""
        rest = b""
        async for chunk in chunks:
            *whole, rest = (rest + chunk).split(b"\n")
            async for lines in self._good(whole):
                yield lines
            if len(rest) > self._max_body_bytes:
                self._fault("line_too_long", f"it has more than {self._max_body_bytes} bytes")
                return
            if self._is_full:
                break
        async for lines in self._good([rest]):
            yield lines
        if self.num_lines > MAX_LINES or self._number > MAX_LINES + _MAX_EMPTY:
            most = f"at most {MAX_LINES} lines, and {_MAX_EMPTY} empty ones"
            self._fault("too_many_lines", f"a batch can have {most}")
        elif not self.num_lines and not self.faults:
            self._fault("empty_file", "the file has no requests")

    @property
    def _is_full(self) -> bool:
        """Whether there are more lines, or faults, than a batch can have."""
        return (
            len(self.faults) >= MAX_FAULTS
            or self.num_lines > MAX_LINES
            or self._number > MAX_LINES + _MAX_EMPTY
        )

    async def _good(self, texts: list[bytes]) -> AsyncIterator[list[Line]]:
        lines: list[Line] = []
        for text in texts:
            if self._is_full:
                break
            if (line := self._line(text)) is not None:
                lines.append(line)
            if self._number % PIECE == 0:  # a turn of the event loop, which others want, too
                if lines:
                    yield lines
                    lines = []
                await asyncio.sleep(0)
        if lines:
            yield lines

    def _line(self, text: bytes) -> Line | None:
        self._number += 1
        if self._number == 1:  # as editors on Windows begin files
            text = text.removeprefix(BOM_UTF8)
        if not text.strip():
            return None
        try:
            given = _decoded(text, self._endpoint)
            check_custom_id(given.custom_id, self._ids)
            line = make_line(self._number, given.custom_id, given.body)
            if len(self.models) < 2:
                model = given.body.get("model")
                self.models.add(model if isinstance(model, str) else None)
        except Faulty as fault:
            self._fault(fault.kind, fault.message, fault.param)
            return None
        self.num_lines += 1
        return line

    def _fault(self, code: str, message: str, param: str | None = None) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(LineFault(code, message, param, self._number))


def make_line(number: int, custom_id: str, body: dict[str, Any]) -> Line:
    """Return a line for a request. Raises Faulty."""
    if body.get("stream"):
        raise Faulty("invalid_request", "answers of a batch cannot be streamed", "body.stream")
    for name in _NOT_YOURS:
        if body.get(name) is not None:
            raise Faulty(
                "invalid_request",
                f"{name!r} cannot be set: lines run in the lowest class",
                f"body.{name}",
            )
    if body.get("background"):
        raise Faulty("invalid_request", "a line is in the background already", "body.background")
    begins = [body.get(name) for name in (*_FIRST, *_THEN)]
    prefix = msgspec.json.encode([one for one in begins if one is not None])[:_PREFIX_BYTES]
    return Line(number, custom_id, prefix, msgspec.json.encode(body))


def check_custom_id(custom_id: str, known: set[str]) -> None:
    """Check that an id is a new one, and note it. Raises Faulty."""
    if not 0 < len(custom_id) <= MAX_ID_CHARS or "\0" in custom_id:
        raise Faulty(
            "invalid_custom_id",
            f"'custom_id' must have 1 to {MAX_ID_CHARS} characters",
            "custom_id",
        )
    if custom_id in known:
        raise Faulty(
            "duplicate_custom_id", f"'custom_id' {custom_id[:64]!r} is there twice", "custom_id"
        )
    known.add(custom_id)


def _decoded(text: bytes, endpoint: str) -> InputLine:
    try:
        given = msgspec.convert(JsonReader().read(text, "the line"), InputLine)
    except InvalidRequest as error:
        raise Faulty("invalid_json_line", error.message) from error
    except msgspec.MsgspecError as error:
        raise Faulty("invalid_json_line", f"it is no request of a batch: {error}") from error
    if given.method.upper() != "POST":
        raise Faulty("invalid_method", f"'method' is {given.method[:16]!r}, not 'POST'", "method")
    if given.url != endpoint:
        raise Faulty(
            "mismatched_endpoint",
            f"'url' is {given.url[:64]!r}, but the batch's {endpoint!r}",
            "url",
        )
    return given
