"""What an operator may set about the HTTP side."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.text.parts import ToolFormat
from pdserve.errors import ConfigError

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


def parse_origins(texts: Iterable[str]) -> tuple[str, ...]:
    """Origins of pages as browsers write them, or "*": any. Raises ConfigError."""
    origins = tuple(texts)
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origins {origin!r} is no origin: write 'https://page.example', with the "
                "port if it has one and without a path, or '*'"
            )
    return origins


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """Limits and intervals of the API. Sizes in bytes, times in seconds."""

    max_body_bytes: int = 32 * 2**20
    body_timeout_s: float = 60.0  # for reading one request's body
    idle_timeout_s: float = 75.0  # of a connection: also the time to send a request's headers
    max_connections: int = 8192  # of clients, or as many as the process may have files
    tokenize_wait_s: float = 30.0  # for one long text at /tokenize until those before it are done
    keep_alive_s: float = 15.0  # a stream with nothing to say sends a comment this often
    stall_timeout_s: float = 120.0  # a reader that takes nothing for so long is given up
    cors_origins: tuple[str, ...] = ()  # of pages that may use the server; "*" = of any
    retry_after_s: int = 1  # what a refused client is told to wait, unless more is known
    deadline_s: float = 0.0  # of every request that sets none itself; 0 = none
    tool_format: ToolFormat | None = None  # None = as the model's chat template tells
    splits_reasoning: bool = False  # text between <think> and </think> is reasoning_content
    max_stored_responses: int = 4096  # and conversations, for those who go on from them
    max_stored_bytes: int = 256 * 2**20
    system_fingerprint: str = ""  # "" = derived from the model's name and pdserve's version
