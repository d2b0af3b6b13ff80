"""In whose form a request is answered: OpenAI's, or Anthropic's.

The two protocols share the engine room, and paths of models. Errors and headers are in the form of
the one that the client speaks, whatever went wrong, and however early.
"""

from __future__ import annotations

from aiohttp import web

from coordinator.api.messages.errors import error_body, status_of
from coordinator.api.server.errors import ErrorReply

MESSAGES = "/v1/messages"
_MODELS = "/v1/models"
VERSION_HEADER = "anthropic-version"  # every client of the Messages API sends it


def speaks_messages(request: web.BaseRequest) -> bool:
    """Whether a request is of a client of the Messages API."""
    if _is_below(request.path, _MODELS):
        return VERSION_HEADER in request.headers
    return _is_below(request.path, MESSAGES)


def error_response(request: web.BaseRequest, reply: ErrorReply, request_id: str) -> web.Response:
    """Return an error as a whole response, in the form that the client knows."""
    if not speaks_messages(request):
        return reply.response()
    status = status_of(reply.status, reply.detail.code)
    return web.Response(
        status=status,
        body=error_body(reply.detail, request_id, status),
        headers=reply.headers,
        content_type="application/json",
    )


def id_headers(request: web.BaseRequest, request_id: str) -> dict[str, str]:
    """Return the headers that name a request."""
    named = {"x-request-id": request_id}
    return named | {"request-id": request_id} if speaks_messages(request) else named


def _is_below(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}/")
