"""Errors as clients see them: status, headers and the OpenAI error object."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from coordinator.api.answer.bodies import ErrorBody, ErrorDetail
from coordinator.external.errors import EndpointFailed, EndpointUnavailable
from pdserve.shared import errors
from pdserve.shared.hints.urls import path_instead

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_MAX_MESSAGE_CHARS = 2000
_MAX_HOST = 128

# error class |-> (status, type, whether the client should retry later)
_BY_CLASS: dict[type[BaseException], tuple[int, str, bool]] = {
    errors.RequestError: (400, _INVALID, False),
    errors.GrammarFailed: (400, _INVALID, False),  # only its beginning was checked before
    errors.NoTokenLeft: (400, _INVALID, False),
    errors.Unauthorized: (401, _INVALID, False),
    errors.PermissionDenied: (403, _INVALID, False),
    errors.ModelNotFound: (404, _INVALID, False),
    errors.ResponseNotFound: (404, _INVALID, False),
    errors.ConversationNotFound: (404, _INVALID, False),
    errors.ItemNotFound: (404, _INVALID, False),
    errors.NodeNotFound: (404, _INVALID, False),
    errors.RoleRefused: (409, _INVALID, False),
    errors.IdempotencyKeyInUse: (409, _INVALID, True),
    errors.IdempotencyKeyReused: (422, _INVALID, False),
    errors.Overloaded: (429, "rate_limit_error", True),
    EndpointUnavailable: (503, _SERVER, True),
    errors.BuffersFull: (503, _SERVER, True),
    errors.StoreUnavailable: (503, _SERVER, True),
    errors.AdaptersFull: (409, _INVALID, False),
    errors.TokenizerError: (503, _SERVER, True),
    errors.UnusableLogits: (500, _SERVER, False),
    errors.TransferError: (502, _SERVER, False),
    errors.StaleIncarnation: (502, _SERVER, False),
    errors.MalformedMessage: (502, _SERVER, False),
    EndpointFailed: (502, _SERVER, False),
    errors.NodeLost: (502, _SERVER, False),
    errors.NoNodeAvailable: (503, _SERVER, True),
    errors.NodeDraining: (503, _SERVER, True),
    errors.DeadlineExceeded: (504, "timeout_error", False),
}
_CODE_OF_STATUS = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
    426: "upgrade_required",
    431: "request_too_large",
}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error, ready to be sent as a response or inside a stream."""

    status: int
    detail: ErrorDetail
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The error object as JSON."""
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self) -> web.Response:
        """Return the error as a whole HTTP response."""
        return web.Response(
            status=self.status,
            body=self.body,
            headers=self.headers,
            content_type="application/json",
        )


def describe(error: BaseException, request_id: str, retry_after_s: int) -> ErrorReply:
    """Map an exception to the error reply for the client.

    For an error that is not in the table, the client learns only the request id. `retry_after_s`
    is used for retryable errors that predict no wait themselves.
    """
    for cls in type(error).__mro__:
        if cls in _BY_CLASS and isinstance(error, errors.PdserveError):
            status, kind, is_retryable = _BY_CLASS[cls]
            param = error.param if isinstance(error, errors.RequestError) else None
            headers = _retry_headers(error, retry_after_s) if is_retryable else {}
            if status == web.HTTPUnauthorized.status_code:
                headers["WWW-Authenticate"] = "Bearer"
            detail = ErrorDetail(_shortened(error.message), kind, param, error.code)
            return ErrorReply(status, detail, headers)
    message = f"internal error; quote the request id {request_id} when you report it"
    return ErrorReply(500, ErrorDetail(message, _SERVER, None, "internal_error"))


NO_NODE_S: Final = 5.0  # until a pool without a node may have one again: a process has to start


def _retry_headers(error: errors.PdserveError, default_s: int) -> dict[str, str]:
    """Return the predicted wait in whole seconds, rounded up, or `default_s` if none is known.

    If no retry can succeed, OpenAI's clients are told so.
    """
    predicted_s = error.retry_after_s
    if isinstance(error, errors.NoNodeAvailable):
        predicted_s = predicted_s or NO_NODE_S
    if predicted_s == math.inf:
        return {"x-should-retry": "false"}
    return {"Retry-After": str(math.ceil(predicted_s) if predicted_s > 0 else default_s)}


def describe_http(error: web.HTTPException, request: web.BaseRequest) -> ErrorReply:
    """Map an HTTP error raised by aiohttp or by the body reader to the API's error format."""
    messages = {
        404: f"there is no such path: {request.path}; {_instead(request)}",
        405: f"{request.path} does not support {request.method}",
    }
    message = messages.get(error.status, error.text or error.reason)
    headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    code = _CODE_OF_STATUS.get(error.status)
    return ErrorReply(error.status, ErrorDetail(message, _INVALID, None, code), headers)


def _instead(request: web.BaseRequest) -> str:
    """Say where what was asked for is."""
    known: set[str] = set()
    if isinstance(request, web.Request):
        known = {resource.canonical for resource in request.app.router.resources()}
    return path_instead(request.path, known, f"{request.scheme}://{request.host[:_MAX_HOST]}")


def describe_protocol(error: HttpProcessingError) -> ErrorReply:
    """Map an HTTP parse error: malformed HTTP, or a line or header that is too long."""
    if isinstance(error, LineTooLong):
        status, message = (
            431,
            f"the request line and each header can have at most {error.args[1]} bytes",
        )
    else:
        first_line = error.message.partition("\n")[0].rstrip(":")
        status = web.HTTPBadRequest.status_code
        message = f"the input is not valid HTTP: {first_line[:_MAX_MESSAGE_CHARS]}"
    return ErrorReply(status, ErrorDetail(message, _INVALID, None, _CODE_OF_STATUS[status]))


def _shortened(message: str) -> str:
    """Shorten a message to _MAX_MESSAGE_CHARS, as it may quote client input of any length."""
    if len(message) <= _MAX_MESSAGE_CHARS:
        return message
    return f"{message[:_MAX_MESSAGE_CHARS]} ... ({len(message)} characters)"
