"""What the two generating endpoints do alike."""

from __future__ import annotations

import time

from aiohttp import web

from coordinator.api import callers
from coordinator.api.context import TRACE, ApiContext, RequestTrace
from coordinator.api.fields import GenerationFields
from coordinator.api.formats import AnswerHead, UsageShown
from pdserve.errors import InvalidRequest, NodeDraining


def admit(request: web.Request, context: ApiContext) -> RequestTrace:
    """Begin a call. Raises NodeDraining when the server is about to stop, or RateLimited."""
    trace = request[TRACE]
    trace.endpoint = request.path
    context.observer.request_started(trace.endpoint)
    if context.in_flight.is_draining:
        raise NodeDraining("the coordinator is shutting down")
    callers.begin(context, trace)
    return trace


def usage_shown(body: GenerationFields) -> UsageShown:
    """Where the stream has token counts. Raises InvalidRequest."""
    options = body.stream_options
    if options is None:
        return UsageShown.NOWHERE
    if not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true", "stream_options")
    if not options.include_usage:
        return UsageShown.NOWHERE
    return UsageShown.EVERYWHERE if options.continuous_usage_stats else UsageShown.LAST


def answer_head(context: ApiContext, answer_id: str, model: str) -> AnswerHead:
    """An answer's constant part, made now."""
    return AnswerHead(
        id=answer_id,
        created=int(time.time()),
        model=model,
        system_fingerprint=context.system_fingerprint,
    )
