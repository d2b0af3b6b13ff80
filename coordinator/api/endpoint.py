"""What the two generating endpoints do alike."""

from __future__ import annotations

import time

from aiohttp import web

from coordinator.api import callers
from coordinator.api.context import TRACE, ApiContext, RequestTrace
from coordinator.api.formats import AnswerHead
from coordinator.api.requests import GenerationFields
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


def shows_usage(body: GenerationFields) -> bool:
    """Whether the stream ends with a chunk of token counts. Raises InvalidRequest."""
    options = body.stream_options
    if options is None:
        return False
    if not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true", "stream_options")
    return bool(options.include_usage)


def answer_head(context: ApiContext, answer_id: str, model: str) -> AnswerHead:
    """An answer's constant part, made now."""
    return AnswerHead(
        id=answer_id,
        created=int(time.time()),
        model=model,
        system_fingerprint=context.system_fingerprint,
    )
