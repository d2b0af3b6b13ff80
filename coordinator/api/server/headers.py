"""Headers of every answer, and CORS: which web pages may use this server.

By default no page may: most clusters on a loopback address need no API key, so any page opened in
a browser on that machine could use the cluster.
"""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import HttpVersion11, web

from coordinator.api.context import CONTEXT, TRACE, ApiContext, RequestTrace
from coordinator.api.server import callers
from pdserve.addresses import host_in, is_loopback
from pdserve.errors import PermissionDenied
from pdserve.settings.api_key import API_KEY_VARIABLE

_API_VERSION = "2020-10-01"  # version of OpenAI's API
_PREFLIGHT_S = 600  # how long a browser may cache a preflight answer
_METHODS = "GET, POST, DELETE"
_SHOWN = (
    "openai-processing-ms, openai-version, retry-after, x-request-id, x-should-retry, "
    "x-pdserve-decode-node, x-pdserve-prefill-node, x-ratelimit-limit-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
ANY_ORIGIN = "*"


async def label(request: web.Request, response: web.StreamResponse) -> None:
    """Set the common headers. Handles `on_response_prepare`, the last chance also for streams."""
    context, trace = request.app[CONTEXT], request[TRACE]
    headers = response.headers
    headers.update(callers.limit_headers(context, trace))
    headers["x-request-id"] = trace.request_id
    headers["openai-processing-ms"] = str(_waited_ms(context, trace))
    headers["openai-version"] = _API_VERSION
    headers.update(_origin_headers(request, context.config.cors_origins))
    if "Access-Control-Allow-Origin" in headers:
        headers["Access-Control-Expose-Headers"] = _SHOWN
    if request.version < HttpVersion11 and not isinstance(response, web.Response):
        response.force_close()  # chunks are of 1.1: only that tells where a stream ends


def check_host(request: web.Request) -> None:
    """Without keys, check that the request was sent to this machine. Raises PermissionDenied.

    A page may point its own name at 127.0.0.1 (DNS rebinding): the browser then takes this server
    for the page's own, and lets it do everything.
    """
    host = request.headers.get("Host")
    if host is None or request.app[CONTEXT].tenants.need_keys or is_loopback(host_in(host)):
        return
    raise PermissionDenied(
        f"a cluster without API keys cannot be used as {host[:128]!r}: "
        f"use localhost or 127.0.0.1, or start it with {API_KEY_VARIABLE} or --key-file"
    )


def preflight(request: web.Request, origins: Collection[str]) -> web.Response | None:
    """Return the answer to a CORS preflight request, or None if the request is not one.

    A browser sends the preflight request without the page's API key.
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
    """Check a WebSocket's origin, which browsers do not restrict. Raises PermissionDenied."""
    origin = request.headers.get("Origin")
    if origin is None or origin.partition("://")[2] == request.host:
        return
    if "Access-Control-Allow-Origin" not in _origin_headers(request, origins):
        raise PermissionDenied(
            f"web pages from {origin[:128]!r} may not use this server (see access.cors_origins)"
        )


def _origin_headers(request: web.Request, origins: Collection[str]) -> dict[str, str]:
    """Return CORS headers for an allowed origin, and Vary, so that caches separate origins."""
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
    """Return the milliseconds from receipt to the start of the answer."""
    return round((context.clock.now() - trace.received_s) * 1000)
