"""One row of the API's description: one method of one path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from coordinator.api.terms import CLASS_HEADER, TIMEOUT_HEADER

EVENTS = "text/event-stream"
HTML = "text/html"
JSON = "application/json"
METRICS = "text/plain"

NO_CHOICE = (401,)  # errors that any request with a key can get
READS_BODY = (400, 401, 404, 408, 413, 415, 417, 503)
GENERATES = (400, 401, 403, 404, 408, 413, 415, 417, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the path, the query or a header."""

    where: str
    name: str
    schema: dict[str, Any]
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    name: str
    tag: str
    summary: str
    body: type[Struct] | None = None
    examples: tuple[dict[str, Any], ...] = ()  # example bodies
    answer: Any = None  # type of the JSON answer; None: any object
    media: str = JSON
    events: Any = None  # type of the stream's events, if the answer can be streamed
    also: tuple[int, ...] = ()  # further statuses with the same kind of answer
    errors: tuple[int, ...] = NO_CHOICE
    parameters: tuple[Parameter, ...] = ()


TERMS = (
    Parameter("header", CLASS_HEADER, {"type": "string"}, "The service class."),
    Parameter(
        "header",
        TIMEOUT_HEADER,
        {"type": "number", "exclusiveMinimum": 0},
        "Seconds after which the answer is of no use any more.",
    ),
)
