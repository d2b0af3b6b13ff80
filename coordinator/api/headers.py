"""Headers that every answer has, and what browsers are told: which pages may use this server.

No page may unless the operator says so: most clusters on a loopback address need no key, and then
any page that somebody opens there could use theirs.
"""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web

from coordinator.api import callers
from coordinator.api.context import CONTEXT, TRACE, ApiContext, RequestTrace
from pdserve.errors import PermissionDenied

_API_VERSION = "2020-10-01"  # of OpenAI's API, which is what clients see here
_PREFLIGHT_S = 600  # for which a browser need not ask again
_METHODS = "GET, POST, DELETE"
_SHOWN = (
    "openai-processing-ms, openai-version, retry-after, x-request-id, x-pdserve-decode-node, "
    "x-pdserve-prefill-node, x-ratelimit-limit-requests, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, "
    "x-ratelimit-reset-tokens"
)
ANY_ORIGIN = "*"


async def label(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: of streams, too, this is the last moment for headers."""
    context, trace = request.app[CONTEXT], request[TRACE]
    headers = response.headers
    headers.update(callers.limit_headers(context, trace))
    headers["x-request-id"] = trace.request_id
    headers["openai-processing-ms"] = str(_waited_ms(context, trace))
    headers["openai-version"] = _API_VERSION
    headers.update(_origin_headers(request, context.config.cors_origins))
    if "Access-Control-Allow-Origin" in headers:
        headers["Access-Control-Expose-Headers"] = _SHOWN


def preflight(request: web.Request, origins: Collection[str]) -> web.Response | None:
    """The answer to a browser that asks whether a page may ask; None: it is no such question.

    It comes without a key, whatever the page will have.
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
    """Browsers let any page open a WebSocket: only here is it refused. Raises PermissionDenied."""
    origin = request.headers.get("Origin")
    if origin is None or origin.partition("://")[2] == request.host:
        return
    if "Access-Control-Allow-Origin" not in _origin_headers(request, origins):
        raise PermissionDenied(f"pages of {origin[:128]!r} may not use this server")


def _origin_headers(request: web.Request, origins: Collection[str]) -> dict[str, str]:
    """For a page whose origin is allowed, or for caches, which have to tell origins apart."""
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
    """Until its answer began."""
    return round((context.clock.now() - trace.received_s) * 1000)
