"""The top-level handler: every request gets a well-formed answer, whatever happens to it.

Every answer gets headers, and those of CORS say which web pages may use this server. By default no
page may: most clusters on a loopback address need no API key, so any page opened in
a browser on that machine could use the cluster.

OpenAI's and Anthropic's protocol share the engine room, and paths of models. Headers and errors are
in the form of the one that the client speaks, whatever went wrong, and however early.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection
from secrets import token_hex

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from coordinator.api.context import CONTEXT, TRACE, ApiContext, RequestTrace
from coordinator.api.messages.errors import error_body, status_of
from coordinator.api.server import callers
from coordinator.api.server.connection import Connection
from coordinator.api.server.errors import ErrorReply, describe, describe_http
from pdserve.settings.access import API_KEY_VARIABLE
from pdserve.shared.addresses import host_in, is_loopback
from pdserve.shared.errors import NodeDraining, PermissionDenied

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


_API_VERSION = "2020-10-01"  # version of OpenAI's API
_PREFLIGHT_S = 600  # how long a browser may cache a preflight answer
_METHODS = "GET, POST, DELETE"
_SHOWN = (
    "openai-processing-ms, openai-version, request-id, retry-after, x-request-id, x-should-retry, "
    "x-pdserve-decode-node, x-pdserve-prefill-node, x-ratelimit-limit-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
ANY_ORIGIN = "*"


async def label(request: web.Request, response: web.StreamResponse) -> None:
    """Set the common headers. Handles `on_response_prepare`, the last chance also for streams."""
    context, trace = request.app[CONTEXT], request[TRACE]
    headers = response.headers
    headers.update(callers.limit_headers(context, trace))
    headers.update(id_headers(request, trace.request_id))
    headers["openai-processing-ms"] = str(_waited_ms(context, trace))
    headers["openai-version"] = _API_VERSION
    headers.update(_origin_headers(request, context.config.cors_origins))
    if "Access-Control-Allow-Origin" in headers:
        headers["Access-Control-Expose-Headers"] = _SHOWN
    if request.version < HttpVersion11 and not isinstance(response, web.Response):
        response.force_close()  # chunks are of 1.1: only that tells where a stream ends


def check_host(request: web.Request) -> None:
    """Without keys, check that the request was sent to this machine. Raises PermissionDenied.

    A page may point its own name at 127.0.0.1 (DNS rebinding): the browser then takes this server
    for the page's own, and lets it do everything.
    """
    host = request.headers.get("Host")
    if host is None or request.app[CONTEXT].tenants.need_keys or is_loopback(host_in(host)):
        return
    raise PermissionDenied(
        f"a cluster without API keys cannot be used as {host[:128]!r}: "
        f"use localhost or 127.0.0.1, or start it with {API_KEY_VARIABLE} or --key-file"
    )


def preflight(request: web.Request, origins: Collection[str]) -> web.Response | None:
    """Return the answer to a CORS preflight request, or None if the request is not one.

    A browser sends the preflight request without the page's API key.
    """
    wanted = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or wanted is None or not origins:
        return None
    allowed = _origin_headers(request, origins)
    if "Access-Control-Allow-Origin" in allowed:
        allowed["Access-Control-Allow-Methods"] = _METHODS
        allowed["Access-Control-Max-Age"] = str(_PREFLIGHT_S)
        asked = request.headers.get("Access-Control-Request-Headers")
        if asked is not None:  # "*" would leave out Authorization
            allowed["Access-Control-Allow-Headers"] = asked
    return web.Response(status=204, headers=allowed)


def check_socket_origin(request: web.Request, origins: Collection[str]) -> None:
    """Check a WebSocket's origin, which browsers do not restrict. Raises PermissionDenied."""
    origin = request.headers.get("Origin")
    if origin is None or origin.partition("://")[2] == request.host:
        return
    if "Access-Control-Allow-Origin" not in _origin_headers(request, origins):
        raise PermissionDenied(
            f"web pages from {origin[:128]!r} may not use this server (see access.cors_origins)"
        )


def _origin_headers(request: web.Request, origins: Collection[str]) -> dict[str, str]:
    """Return CORS headers for an allowed origin, and Vary, so that caches separate origins."""
    if ANY_ORIGIN in origins:
        return {"Access-Control-Allow-Origin": ANY_ORIGIN}
    if not origins:
        return {}
    origin = request.headers.get("Origin")
    varies = {"Vary": "Origin"}
    if origin is None or origin not in origins:
        return varies
    return varies | {"Access-Control-Allow-Origin": origin}


def _waited_ms(context: ApiContext, trace: RequestTrace) -> int:
    """Return the milliseconds from receipt to the start of the answer."""
    return round((context.clock.now() - trace.received_s) * 1000)


_log = logging.getLogger(__name__)
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_ID_HEADERS = ("x-request-id", "x-client-request-id")  # the second is OpenAI's for clients


@web.middleware
async def answer_everything(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Trace the request, and turn any exception into an error response of the API."""
    context = request.app[CONTEXT]
    trace = _new_trace(request, context)
    request[TRACE] = trace
    if isinstance(request.protocol, Connection):
        trace.outbox = request.protocol.outbox
    retry_after_s = context.config.retry_after_s
    with context.tasks:
        try:
            check_host(request)
            if (answer := preflight(request, context.config.cors_origins)) is not None:
                return answer
            callers.identify(request, context, trace)
            if trace.owner and isinstance(request.protocol, Connection):
                request.protocol.identify(trace.owner)
            response = await handler(request)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not context.tasks.is_aborting or _is_gone(request) or task is None:
                callers.conclude(
                    context, request[TRACE], callers.CLIENT_GONE, "client_disconnected"
                )
                raise
            if trace.keyed is not None and trace.stream is not None and trace.stream.is_open:
                # As if this process had died: its client comes back to another coordinator.
                callers.conclude(context, trace, 503, NodeDraining.code)
                assert request.transport is not None, "it is not gone"
                request.transport.abort()
                raise
            task.uncancel()
            shutdown = NodeDraining("the coordinator is shutting down")
            return await _reply(request, context, describe(shutdown, "", retry_after_s))
        except web.HTTPException as error:
            return await _reply(request, context, describe_http(error, request))
        except Exception as error:  # whatever it is, the client gets an answer
            if _is_gone(request):
                callers.conclude(
                    context, request[TRACE], callers.CLIENT_GONE, "client_disconnected"
                )
                raise ConnectionResetError from error  # there is no client to answer
            reply = describe(error, trace.request_id, retry_after_s)
            if reply.detail.code == "internal_error":
                _log.exception("request %s failed", trace.request_id)
            return await _reply(request, context, reply)
        callers.conclude(context, request[TRACE], response.status, None)
        return response


async def _reply(
    request: web.Request, context: ApiContext, reply: ErrorReply
) -> web.StreamResponse:
    """Return an error response, or, if a stream has begun, send the error as its last event."""
    trace = request[TRACE]
    callers.conclude(context, trace, reply.status, reply.detail.code)
    stream = trace.stream
    if stream is None or trace.format is None or not stream.is_open:
        response = error_response(request, reply, trace.request_id)
        if context.tasks.is_draining or request.content.exception() is not None:
            response.force_close()
        return response
    await stream.send([trace.format.failure(reply.detail)])
    await stream.close()
    return stream.response


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _new_trace(request: web.Request, context: ApiContext) -> RequestTrace:
    unique = token_hex(16)
    given = (request.headers.get(name, "") for name in _ID_HEADERS)
    theirs = next((text for text in given if _SANE_ID.fullmatch(text)), None)
    return RequestTrace(
        unique=unique,
        request_id=theirs or f"req-{unique}",
        received_s=context.clock.now(),
        address=request.remote or "",
    )
