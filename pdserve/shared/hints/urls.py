"""Addresses and paths of the API, as people write them who have used other servers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

_URL: Final = re.compile(r"https?://[^/\s?#]+(/[^\s?#]*)?")
_VERSION: Final = "/v1"
# A path of Ollama, TGI, Anthropic or an older OpenAI |-> the one with which the same is asked here.
_INSTEAD: Final[Mapping[str, str]] = {
    "/api/tags": "/v1/models",
    "/api/ps": "/v1/models",
    "/api/show": "/v1/models",
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/api/version": "/version",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
    "/chat": "/v1/chat/completions",
    "/v1/chat": "/v1/chat/completions",
    "/v1/complete": "/v1/completions",
    "/info": "/v1/models",
    "/healthz": "/health",
    "/livez": "/health",
    "/readyz": "/health",
    "/ping": "/health",
    "/props": "/status",
    "/slots": "/status",
}
# A path of OpenAI's that is not served |-> why not, and what to do.
_REFUSED: Final[Mapping[str, str]] = {
    "/v1/moderations": "moderations need a classifier, and this server's models generate: ask one "
    "with /v1/chat/completions, and 'structured_outputs' with a 'choice' of verdicts",
}


def check_url(text: str) -> str:
    """Return the address of a server, such as "http://127.0.0.1:8000", if it is one.

    Raises:
        ValueError: it is none; says what to write.
    """
    if not _URL.fullmatch(text):
        rest = re.sub(r"^(\w+:)?/+", "", text).split("?")[0].strip("/ ") or "127.0.0.1:8000"
        raise ValueError(f'"{text}" is not the address of a server: write it as "http://{rest}"')
    url = text.rstrip("/")
    if url.endswith(_VERSION):
        raise ValueError(f'"{text}": write "{url.removesuffix(_VERSION)}"; {_VERSION} is added')
    return url


def path_instead(path: str, known: Collection[str], origin: str) -> str:
    """Say where to ask instead of at a path that there is not.

    Args:
        path: that was asked for.
        known: the paths that there are.
        origin: of this server: "http://127.0.0.1:8000".
    """
    plain = re.sub(r"/+", "/", path).rstrip("/") or "/"
    if reason := _REFUSED.get(plain):
        return reason
    base = f"{origin}{_VERSION}"
    if meant := _INSTEAD.get(plain):
        return f"use {origin}{meant}; clients of OpenAI's API have the base URL {base}"
    bare = [plain[i:] for i, sign in enumerate(plain) if sign == "/"]
    ends = [plain, *(_VERSION + end for end in bare), *bare]
    if meant := next((end for end in ends if end in known and len(end) > 1), ""):
        is_versioned = meant.startswith(_VERSION)
        why = f": the base URL of clients is {base}" if is_versioned else ""
        return f"it is {origin}{meant}{why}"
    return f"{origin}/docs lists all, and the base URL of clients is {base}"
