"""Operator settings of the HTTP API."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.api.read.body_budget import SLOW_S, WAIT_S
from coordinator.api.read.idempotency import FORMER_S
from coordinator.api.server.https import HANDSHAKE_S
from pdserve.settings.timeouts import IDLE_S
from pdserve.shared.errors import ConfigError

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


def parse_origins(texts: Iterable[str]) -> tuple[str, ...]:
    """Validate origins of web pages, as browsers write them, or "*" for any. Raises ConfigError."""
    origins = tuple(texts)
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"access.cors_origins: {origin!r} is not an origin; write it as "
                "'https://page.example', with a port if it has one and without a path, or '*' for "
                "all"
            )
    return origins


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """Limits and intervals of the API. Sizes in bytes, times in seconds."""

    max_body_bytes: int = 16 * 2**20
    max_buffered_bytes: int = 128 * 2**20  # of all bodies until their calls are planned
    max_unread_bytes: int = 32 * 2**20  # of answers, made and not read by their clients
    body_timeout_s: float = 60.0  # for reading one request's body
    space_wait_s: float = WAIT_S  # of a body, for space in memory
    slow_sender_s: float = SLOW_S  # without progress, after which one gives way to others
    handshake_timeout_s: float = HANDSHAKE_S  # of TLS
    former_call_s: float = FORMER_S  # a client that comes back waits for its former connection
    socket_age_s: float = 3600.0  # maximum age of a WebSocket
    idle_timeout_s: float = IDLE_S  # of a connection: also the time to send a request's headers
    max_connections: int = 8192  # of clients; fewer if the process's file limit is lower
    keep_alive_s: float = 15.0  # interval of keep-alive comments on an idle stream
    stall_timeout_s: float = 120.0  # a client that reads nothing for this long is disconnected
    cors_origins: tuple[str, ...] = ()  # origins of pages that may use the server; "*" = any
    retry_after_s: int = 1  # Retry-After of a refused request, when no wait is predicted
    deadline_s: float = 0.0  # for requests that set no time-out themselves; 0 = none
    splits_reasoning: bool = False  # text between <think> and </think> is reasoning_content
