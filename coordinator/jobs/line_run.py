"""Runs one line as a call of its tenant's, until it has an answer or an error of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b

from coordinator.api.calls import Endpoint, run_whole
from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.messages.errors import error_body, status_of
from coordinator.api.read.ask import Ask
from coordinator.api.read.idempotency import KeyedCall
from coordinator.api.read.json_text import JsonReader
from coordinator.api.read.terms import CLASS_HEADER
from coordinator.api.server.callers import CLIENT_GONE, begin_call, conclude
from coordinator.api.server.errors import ErrorReply, describe
from coordinator.api.server.middleware import MESSAGES
from coordinator.jobs.storage.batches import Batch, Line
from coordinator.tenants import Admitted
from pdserve.shared.errors import InvalidRequest, PermissionDenied
from pdserve.shared.slo import ServiceClasses

_MAX_FAILURES = 3  # of the cluster, after which a line has failed
_BACKOFF_S = 1.0  # after one
_MOST_PAUSE_S = 300.0
_LATER = (429, 503)
_LATE = 504  # no fault of a line that has only waited


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """How one line was answered, in its endpoint's own form."""

    status: int
    request_id: str
    body: bytes  # JSON

    @property
    def is_good(self) -> bool:
        """Whether it is no error."""
        return self.status == 200


async def run_line(
    batch: Batch,
    line: Line,
    read: Callable[[], Awaitable[bytes]],
    endpoint: Endpoint,
    context: ApiContext,
    begun: Callable[[], None],
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> LineAnswer:
    """Return the answer to a line; what is no fault of its own is tried again.

    `read` returns its body, which is not kept meanwhile. Its call is keyed by the batch and the
    line: made again, it is the same, and goes on with what nodes still have of it. `pause` waits
    before it is: ever longer where tiers of a cascade have answered in vain, which costs each time.
    """
    path, num_failures, first_tokens = batch.document.endpoint, 0, asyncio.Event()
    least_s = _BACKOFF_S

    def has_begun() -> None:
        first_tokens.set()
        begun()

    digest = blake2b(f"{batch.id}/{line.number}".encode(), digest_size=32).digest()
    while True:
        keyed = KeyedCall(batch.owner, "", path, None, digest=digest)
        trace = RequestTrace(
            unique=keyed.unique,
            request_id=f"batch_req_{keyed.unique}",
            received_s=context.clock.now(),
            keyed=keyed,
        )
        try:
            body = await _call(batch, read, endpoint, context, trace, has_begun)
        except asyncio.CancelledError:
            conclude(context, trace, CLIENT_GONE, "cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this line's answer
            reply = describe(error, trace.request_id, context.config.retry_after_s)
            conclude(context, trace, reply.status, reply.detail.code)
        else:
            conclude(context, trace, 200, None)
            return LineAnswer(200, trace.request_id, body)
        is_busy = reply.status in _LATER and "Retry-After" in reply.headers
        is_busy = is_busy or (reply.status == _LATE and not first_tokens.is_set())
        num_failures += reply.status >= 500 and not is_busy
        if not is_busy and (reply.status < 500 or num_failures >= _MAX_FAILURES):
            return _failed(path, reply, trace.request_id)
        if trace.tiers:
            least_s = min(2 * least_s, _MOST_PAUSE_S)
        # As any client would: what it was refused for says when to come again, and no more.
        await pause(max(least_s, float(reply.headers.get("Retry-After", _BACKOFF_S))))


async def _call(
    batch: Batch,
    read: Callable[[], Awaitable[bytes]],
    endpoint: Endpoint,
    context: ApiContext,
    trace: RequestTrace,
    begun: Callable[[], None],
) -> bytes:
    caller = context.tenants.stand_in(batch.owner, batch.document.key_id)
    if caller is None:
        raise PermissionDenied("the tenant of this batch does not exist any more")
    trace.caller = caller
    begin_call(trace, batch.document.endpoint, context)
    trace.body = held = context.bodies.body(trace.payer)  # until its call is planned, as of others
    text = await read()
    await held.take(len(text))
    values = await JsonReader().read_long(text, "the request", held)
    if not isinstance(values, dict):
        raise InvalidRequest("the request must be a JSON object")
    headers = {CLASS_HEADER: lowest_class(caller, context.classes)}
    ask = Ask(values, headers, context, trace)
    return (await run_whole(ask, await endpoint.plan(ask), begun)).body


def lowest_class(caller: Admitted, classes: ServiceClasses) -> str:
    """Return the class of lowest priority that a tenant may use."""
    own = [name for name in caller.tenant.classes if name in classes.by_name]
    return min(own or classes.by_name, key=lambda name: classes.by_name[name].priority)


def _failed(path: str, reply: ErrorReply, request_id: str) -> LineAnswer:
    if path != MESSAGES:
        return LineAnswer(reply.status, request_id, reply.body)
    status = status_of(reply.status, reply.detail.code)
    return LineAnswer(status, request_id, error_body(reply.detail, request_id, status))
