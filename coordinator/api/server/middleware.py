"""The top-level handler: every request gets a well-formed answer, whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from coordinator.api.context import CONTEXT, TRACE, ApiContext, RequestTrace
from coordinator.api.server import callers
from coordinator.api.server.connection import Connection
from coordinator.api.server.errors import ErrorReply, describe, describe_http
from coordinator.api.server.headers import check_host, preflight
from pdserve.errors import NodeDraining

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
    with context.tasks.entered():
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
        except Exception as error:
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
        response = reply.response()
        if context.tasks.is_draining or request.content.exception() is not None:
            response.force_close()
        return response
    await stream.send([trace.format.failure(reply.detail)])
    await stream.close()
    return stream.response


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _new_trace(request: web.Request, context: ApiContext) -> RequestTrace:
    unique = uuid.uuid4().hex
    given = (request.headers.get(name, "") for name in _ID_HEADERS)
    theirs = next((text for text in given if _SANE_ID.fullmatch(text)), None)
    return RequestTrace(
        unique=unique,
        request_id=theirs or f"req-{unique}",
        received_s=context.clock.now(),
        address=request.remote or "",
    )
