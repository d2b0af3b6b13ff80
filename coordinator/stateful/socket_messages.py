"""WebSocket messages other than a response's events: requests and errors."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.api.answer.bodies import ErrorDetail
from coordinator.api.server.errors import ErrorReply
from pdserve.shared.errors import InvalidRequest


class SocketError(msgspec.Struct, tag_field="type", tag="error"):
    """The answer to a message for which no response was begun."""

    status: int
    error: ErrorDetail


def refusal(reply: ErrorReply) -> bytes:
    """Return the message for an error. It always has a code, as clients look for one."""
    detail = msgspec.structs.replace(reply.detail, code=reply.detail.code or reply.detail.type)
    return msgspec.json.encode(SocketError(reply.status, detail))


def body_of(values: Any) -> dict[str, Any]:
    """Return the request body in a `response.create` message, which is streamed.

    Raises InvalidRequest.
    """
    if not isinstance(values, dict):
        raise InvalidRequest("the message must be a JSON object")
    kind = values.pop("type", None)
    if kind != "response.create":
        raise InvalidRequest(f"'type' is {str(kind)[:64]!r}, but must be 'response.create'", "type")
    for name, value in (("background", True), ("stream", False)):
        if values.get(name) is value:
            said = str(value).lower()
            raise InvalidRequest(f"{name!r} cannot be {said} over a WebSocket", name)
    return values | {"stream": True}


def as_message(event: bytes, kind: str) -> bytes:
    """Return the event unchanged: its JSON already has its type."""
    return event
