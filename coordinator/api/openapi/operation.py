"""One row of the API's description: one method of one path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from coordinator.api.answer.bodies import ErrorBody
from coordinator.api.read.terms import CLASS_HEADER, TIMEOUT_HEADER

EVENTS = "text/event-stream"
HTML = "text/html"
JSON = "application/json"
METRICS = "text/plain"

NO_CHOICE = (401,)  # errors that any request with a key can get
READS_BODY = (400, 401, 404, 408, 413, 415, 417, 503)
COUNTS = (*READS_BODY, 429)  # no node is involved
GENERATES = (400, 401, 403, 404, 408, 413, 415, 417, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of an operation outside of its body."""

    where: str  # "path", "query" or "header"
    name: str
    description: str
    schema: dict[str, Any] = field(default_factory=lambda: {"type": "string"})


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
    error: type[Struct] = ErrorBody
    errors: tuple[int, ...] = NO_CHOICE
    parameters: tuple[Parameter, ...] = ()


def in_path(name: str, description: str) -> Parameter:
    """Return a parameter that is a segment of the path."""
    return Parameter(where="path", name=name, description=description)


def in_query(name: str, description: str, **schema: Any) -> Parameter:
    """Return a parameter in the query; `schema` are keywords of JSON schema."""
    return Parameter(where="query", name=name, description=description, schema=schema)


def in_header(name: str, description: str, **schema: Any) -> Parameter:
    """Return a parameter in a header; `schema` are keywords of JSON schema."""
    return Parameter(where="header", name=name, description=description, schema=schema)


TERMS = (
    in_header(CLASS_HEADER, "The name of a service class.", type="string"),
    in_header(
        TIMEOUT_HEADER,
        "The deadline: seconds after which the answer is of no use to the client.",
        type="number",
        exclusiveMinimum=0,
    ),
)
