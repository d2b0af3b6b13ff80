"""Whose a request is: from its API key to a tenant, and what the call costs it."""

from __future__ import annotations

from aiohttp import web

from coordinator.api.context import ApiContext, RequestTrace
from coordinator.tenants.ledger import Amounts
from pdserve.errors import PermissionDenied

_CLIENTS = ("/v1/", "/tokenize", "/detokenize")
_OPERATORS = "/admin/"
_SCHEME = "bearer "


def identify(request: web.Request, context: ApiContext, trace: RequestTrace) -> None:
    """Find out whose it is, where that matters. Raises Unauthorized or PermissionDenied.

    What only tells how the cluster is (/health, /metrics, /status, /version) is open to whoever can
    reach it.
    """
    if not request.path.startswith((*_CLIENTS, _OPERATORS)):
        return
    caller = context.tenants.identify(_key_of(request))
    if request.path.startswith(_OPERATORS) and caller.tenant.name and not caller.tenant.is_operator:
        raise PermissionDenied(f"{caller.tenant.name!r} is no operator of this cluster")
    trace.caller = caller


def begin(context: ApiContext, trace: RequestTrace) -> None:
    """A call begins. Raises RateLimited."""
    if trace.caller is not None:
        context.tenants.begin(trace.caller)


def take_prompt(context: ApiContext, trace: RequestTrace) -> None:
    """Its prompts are known. Raises RateLimited."""
    if trace.caller is not None:
        context.tenants.take_prompt(trace.caller, trace.num_prompt_tokens)


def limit_headers(context: ApiContext, trace: RequestTrace) -> dict[str, str]:
    """x-ratelimit-*, as of now."""
    return {} if trace.caller is None else context.tenants.headers(trace.caller)


def end(context: ApiContext, trace: RequestTrace, code: str | None) -> None:
    """A call is over."""
    if trace.caller is None or trace.endpoint is None:
        return
    used = Amounts(
        requests=1,
        failed=int(code is not None),
        prompt_tokens=trace.num_prompt_tokens if trace.was_served else 0,
        cached_tokens=trace.num_cached_tokens,
        output_tokens=trace.num_completion_tokens,
    )
    context.tenants.end(trace.caller, used)


def _key_of(request: web.Request) -> str | None:
    header = request.headers.get("Authorization", "")
    if header[: len(_SCHEME)].lower() != _SCHEME:
        return None
    return header[len(_SCHEME) :].strip() or None
