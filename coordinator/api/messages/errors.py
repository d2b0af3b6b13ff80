"""Errors as clients of the Messages API see them: their own types, and 529 for a busy cluster."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from coordinator.api.answer import bodies

OVERLOADED = 529
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_BUSY = frozenset(  # codes of a cluster that has no room now, or no node
    {
        "buffers_full",
        "no_node_available",
        "node_draining",
        "overloaded",
        "slo_unreachable",
        "store_unavailable",
    }
)
_TYPE_OF_OURS = {
    "invalid_request_error": "invalid_request_error",
    "rate_limit_error": "rate_limit_error",
    "timeout_error": "timeout_error",
    "server_error": "api_error",
}


class ErrorCode(Struct):
    """What a program may tell errors of one type by."""

    error_code: str


class FailureDetail(Struct, omit_defaults=True):
    """An error's type and message."""

    type: str
    message: str
    details: ErrorCode | None = None


class FailedCall(Struct, kw_only=True, tag_field="type", tag="error"):
    """The body of every error response, and the last event of a stream that failed."""

    error: FailureDetail
    request_id: str


def status_of(status: int, code: str | None) -> int:
    """Return the status that says the same: a busy cluster is not a tenant's rate limit."""
    return OVERLOADED if code in _BUSY else status


def failed_call(detail: bodies.ErrorDetail, request_id: str, status: int) -> FailedCall:
    """Return an error of this (own) status in the form of the Messages API."""
    kind = _TYPE_OF_STATUS.get(status) or _TYPE_OF_OURS.get(detail.type, "api_error")
    details = None if detail.code is None else ErrorCode(detail.code)
    return FailedCall(error=FailureDetail(kind, detail.message, details), request_id=request_id)


def error_body(detail: bodies.ErrorDetail, request_id: str, status: int) -> bytes:
    """Return the error as JSON."""
    return msgspec.json.encode(failed_call(detail, request_id, status))
