"""Steps that the generating endpoints share: admission, accounting, answer metadata."""

from __future__ import annotations

import time

from aiohttp import web

from coordinator.api import callers
from coordinator.api.context import TRACE, ApiContext, RequestTrace
from coordinator.api.fields import GenerationFields
from coordinator.api.formats import AnswerHead, UsageShown
from pdserve.errors import InvalidRequest, NodeDraining

CLIENT_GONE = 499  # nginx's status for "client closed request"; only recorded, never received


def admit(request: web.Request, context: ApiContext) -> RequestTrace:
    """Begin a call to a generating endpoint, and return its trace.

    Raises NodeDraining when the server is shutting down, or RateLimited.
    """
    trace = request[TRACE]
    begin_call(trace, request.path, context)
    return trace


def begin_call(trace: RequestTrace, endpoint: str, context: ApiContext) -> None:
    """Mark the request as a call of `endpoint` and begin it. Raises what `admit` raises."""
    trace.endpoint = endpoint
    if context.in_flight.is_draining:
        raise NodeDraining("the coordinator is shutting down")
    callers.begin(context, trace)


def conclude(context: ApiContext, trace: RequestTrace, status: int, code: str | None) -> None:
    """Finish a request; if it was a call, charge its tenant and report it to the observer."""
    trace.release_body()
    callers.end(context, trace, code)
    if trace.endpoint is not None:
        summary = trace.summary(trace.endpoint, status, code, context.clock.now())
        context.observer.request_finished(summary)


def usage_shown(body: GenerationFields) -> UsageShown:
    """Return which chunks of the stream carry token counts. Raises InvalidRequest."""
    options = body.stream_options
    if options is None:
        return UsageShown.NOWHERE
    if not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true", "stream_options")
    if not options.include_usage:
        return UsageShown.NOWHERE
    return UsageShown.EVERYWHERE if options.continuous_usage_stats else UsageShown.LAST


def answer_head(context: ApiContext, answer_id: str, model: str) -> AnswerHead:
    """Return the fields that every chunk of the answer repeats; `created` is the current time."""
    return AnswerHead(
        id=answer_id,
        created=int(time.time()),
        model=model,
        system_fingerprint=context.system_fingerprint,
    )
