"""The caller of a request: who it is, from the first look at its key to the charge for its call."""

from __future__ import annotations

from hmac import compare_digest

from aiohttp import web

from coordinator.api.context import TRACE, ApiContext, RequestTrace
from coordinator.api.read.idempotency import keyed_call
from coordinator.tenants.ledger import Amounts
from pdserve.errors import NodeDraining, PermissionDenied, Unauthorized

_CLIENTS = ("/v1/", "/tokenize", "/detokenize")
_OPERATORS = "/admin/"
_STATE = ("/status", "/metrics", "/metrics/targets")
_SCHEME = "bearer "
CLIENT_GONE = 499  # nginx's status for "client closed request"; only recorded, never received


def identify(request: web.Request, context: ApiContext, trace: RequestTrace) -> None:
    """Identify the tenant of a request, on paths that need one, and record it in the trace.

    /health and /version are open to anybody, and what tells the state of the cluster is unless
    there is a token for it. Raises Unauthorized or PermissionDenied.
    """
    if request.path in _STATE and context.config.metrics_token:
        _check_monitor(_key_of(request), context)
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
        context.tenants.take_prompt(trace.caller, trace.num_prompt_tokens)


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
        context.observer.request_finished(summary)


def _check_monitor(shown: str | None, context: ApiContext) -> None:
    """Check that somebody may read the state: with the token for it, or a key. Raises Unauthorized.

    An operator's dashboards have no key, and whoever has one sees nothing new.
    """
    token = context.config.metrics_token
    sent = b"" if shown is None else shown.encode(errors="surrogateescape")  # may be no UTF-8
    if compare_digest(sent, token.encode()):
        return
    if not context.tenants.need_keys:
        raise Unauthorized(
            "the token of access.metrics_token_file is needed: send it as 'Authorization: Bearer'"
        )
    context.tenants.identify(shown)


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
    context.tenants.end(trace.caller, used)


def _key_of(request: web.Request) -> str | None:
    header = request.headers.get("Authorization", "")
    if header[: len(_SCHEME)].lower() != _SCHEME:
        return None
    return header[len(_SCHEME) :].strip() or None
