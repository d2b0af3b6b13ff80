"""What has happened in a life, for people to read; messages are only described when asked for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

KEPT = 3000
_LONG = 160


class Trace:
    """The newest events, and a digest of the order of all: equal for equal lives."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, tuple[Any, ...]]] = deque(maxlen=KEPT)
        self._digest = blake2b(digest_size=8)

    def note(self, *what: Any) -> None:
        """Something has happened now."""
        now_s = asyncio.get_running_loop().time()
        self._events.append((now_s, what))
        self._digest.update(f"{now_s:.9f}{what[0]}".encode())

    @property
    def digest(self) -> str:
        """Of all that has happened so far."""
        return self._digest.hexdigest()

    def lines(self, most: int) -> Iterator[str]:
        """The last of them, one a line."""
        for now_s, what in list(self._events)[-most:]:
            yield f"{now_s - 1000:9.4f} " + " ".join(map(_described, what))


def _described(part: Any) -> str:
    held = getattr(part, "messages", None)
    if held is None:
        return str(part)[:_LONG]
    return ", ".join(_of_message(message) for message in held)


def _of_message(held: Any) -> str:
    kind = held.WhichOneof("body")
    body = getattr(held, kind)
    text = " ".join(str(body).split()) if kind in ("failed", "cancel", "ended", "settle") else ""
    if kind == "load":
        text = f"state {body.state} role {body.role} free {body.free_blocks}"
    elif kind == "tokens":
        ids = [f"{e.request_id}[{e.index}]={list(e.token_ids)}" for e in body.events]
        ids += [
            f"{r}[{i}]={t}"
            for r, i, t in zip(body.request_ids, body.indices, body.token_ids, strict=True)
        ]
        text = " ".join(ids)
    elif not text:
        text = getattr(body, "request_id", "")
        if kind == "decode":
            text += f" after {len(body.output_token_ids)}"
    return f"{kind}({text[:_LONG]})"
