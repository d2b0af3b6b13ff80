"""The caller of a request: who it is, from the first look at its key to the charge for its call."""

from __future__ import annotations

from aiohttp import web

from coordinator.api.answer.bodies import TierUsage
from coordinator.api.context import TRACE, ApiContext, RequestTrace
from coordinator.api.read.idempotency import keyed_call
from coordinator.tenants.ledger import Amounts
from pdserve.shared.errors import NodeDraining, PermissionDenied

_CLIENTS = ("/v1/", "/tokenize", "/detokenize")
_OPERATORS = "/admin/"
_STATE = ("/status", "/metrics", "/metrics/targets", "/admin/live")
_SCHEME = "bearer "
KEY_HEADER = "x-api-key"  # in which older Anthropic clients send the key
CLIENT_GONE = 499  # nginx's status for "client closed request"; only recorded, never received


def identify(request: web.Request, context: ApiContext, trace: RequestTrace) -> None:
    """Identify the tenant of a request, on paths that need one, and record it in the trace.

    /health and /version are open to anybody; what tells the state of the cluster is for its
    readers. Raises Unauthorized or PermissionDenied.
    """
    if request.path in _STATE:
        context.readers.check(_key_of(request))
    if not request.path.startswith((*_CLIENTS, _OPERATORS)):
        return
    caller = context.tenants.identify(_key_of(request))
    if request.path.startswith(_OPERATORS) and caller.tenant.name and not caller.tenant.is_operator:
        raise PermissionDenied(
            f"only operators of this cluster may do this, and {caller.tenant.name!r} is not one"
        )
    trace.caller = caller


def admit(request: web.Request, context: ApiContext) -> RequestTrace:
    """Begin a call to a generating endpoint, and return its trace.

    Raises NodeDraining when the server is shutting down, or RateLimited.
    """
    trace = request[TRACE]
    trace.span = context.begin_span(request.headers)
    begin_call(trace, request.path, context)
    return trace


def admit_keyed(request: web.Request, context: ApiContext) -> RequestTrace:
    """As `admit`, for an endpoint that heeds an idempotency key. Also raises InvalidRequest."""
    trace = admit(request, context)
    trace.keyed = keyed_call(request.headers, trace.owner, request.path)
    return trace


def begin_call(trace: RequestTrace, endpoint: str, context: ApiContext) -> None:
    """Mark the request as a call of `endpoint` and begin it. Raises what `admit` raises."""
    trace.endpoint = endpoint
    if context.tasks.is_draining:
        raise NodeDraining("the coordinator is shutting down")
    begin(context, trace)


def begin(context: ApiContext, trace: RequestTrace) -> None:
    """Count the beginning of a call against the tenant's limits. Raises RateLimited."""
    if trace.caller is not None:
        context.tenants.begin(trace.caller)


def take_prompt(context: ApiContext, trace: RequestTrace) -> None:
    """Count the call's prompt tokens against the tenant's limits. Raises RateLimited."""
    if trace.caller is not None:
        context.tenants.take_prompt(trace.caller, trace.num_prompt_tokens, trace.model)


def limit_headers(context: ApiContext, trace: RequestTrace) -> dict[str, str]:
    """Return the current x-ratelimit-* headers."""
    return {} if trace.caller is None else context.tenants.headers(trace.caller)


def conclude(context: ApiContext, trace: RequestTrace, status: int, code: str | None) -> None:
    """Finish a request; if it was a call, charge its tenant and report it to the observer."""
    trace.release_body()
    if trace.keyed is not None:
        context.known_keys.end(trace.keyed)
    _charge(context, trace, code)
    if trace.endpoint is not None:
        summary = trace.summary(trace.endpoint, status, code, context.clock.now())
        context.observer.of(trace.model).request_finished(summary)


def _charge(context: ApiContext, trace: RequestTrace, code: str | None) -> None:
    """Charge a finished call to its tenant; does nothing for requests that are not calls.

    A prompt that was sent to nodes is charged even if nobody waited for its first token: otherwise
    callers that leave early would be served for nothing.
    """
    if trace.caller is None or trace.endpoint is None:
        return
    used = Amounts(
        requests=1,
        failed=int(code is not None),
        prompt_tokens=trace.num_dispatched_tokens,
        cached_tokens=trace.num_cached_tokens,
        output_tokens=trace.num_completion_tokens,
    )
    context.tenants.end(trace.caller, used, trace.model)


def charge_tier(context: ApiContext, trace: RequestTrace, used: TierUsage) -> None:
    """Charge the model that the call has asked last, which is not to answer it."""
    if trace.caller is not None:
        amounts = Amounts(
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens,
            output_tokens=used.completion_tokens,
        )
        context.tenants.end(trace.caller, amounts, trace.model)


def _key_of(request: web.Request) -> str | None:
    header = request.headers.get("Authorization", "")
    if header[: len(_SCHEME)].lower() != _SCHEME:
        return request.headers.get(KEY_HEADER)
    return header[len(_SCHEME) :].strip() or None
