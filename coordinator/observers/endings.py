"""How a call ended, and through whose fault: a client's mistake is no failure of the cluster."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Final

from coordinator.api.server.callers import CLIENT_GONE
from coordinator.api.server.errors import describe
from pdserve.errors import RequestCancelled, from_code

_TOO_MANY_REQUESTS: Final = 429


class Ending(StrEnum):
    """The ways in which a call, or a request of one, ends."""

    ANSWERED = "answered"
    FAILED = "failed"  # through no fault of the client
    REFUSED = "refused"  # there was no room, or the tenant is beyond its limits
    REJECTED = "rejected"  # the client asked for what cannot be
    LEFT = "left"  # the client has hung up, or cancelled it


def ending_of_status(status: int) -> Ending:
    """Return how a call with this HTTP status ended."""
    if status < 400:
        return Ending.ANSWERED
    if status >= 500:
        return Ending.FAILED
    return {_TOO_MANY_REQUESTS: Ending.REFUSED, CLIENT_GONE: Ending.LEFT}.get(
        status, Ending.REJECTED
    )


@cache
def ending_of_code(code: str) -> Ending:
    """Return how a request with this error code ended; empty: it has none."""
    if not code:
        return Ending.ANSWERED
    error = from_code(code, "")
    if isinstance(error, RequestCancelled):
        return Ending.LEFT
    return ending_of_status(describe(error, "", 0).status)
