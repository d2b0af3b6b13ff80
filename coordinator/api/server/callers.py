"""The caller of a request: maps the API key to a tenant, and charges the tenant for calls."""

from __future__ import annotations

from aiohttp import web

from coordinator.api.context import ApiContext, RequestTrace
from coordinator.tenants.ledger import Amounts
from pdserve.errors import PermissionDenied

_CLIENTS = ("/v1/", "/tokenize", "/detokenize")
_OPERATORS = "/admin/"
_SCHEME = "bearer "


def identify(request: web.Request, context: ApiContext, trace: RequestTrace) -> None:
    """Identify the tenant of a request, on paths that need one, and record it in the trace.

    Paths that only report the state of the cluster (/health, /metrics, /status, /version) are open
    to anybody. Raises Unauthorized or PermissionDenied.
    """
    if not request.path.startswith((*_CLIENTS, _OPERATORS)):
        return
    caller = context.tenants.identify(_key_of(request))
    if request.path.startswith(_OPERATORS) and caller.tenant.name and not caller.tenant.is_operator:
        raise PermissionDenied(
            f"only operators of this cluster may do this, and {caller.tenant.name!r} is not one"
        )
    trace.caller = caller


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


def end(context: ApiContext, trace: RequestTrace, code: str | None) -> None:
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
