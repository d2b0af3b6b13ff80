"""A server elsewhere that speaks OpenAI's API, and fails as a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.fakes.http import serving

Said = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
MODEL = "large-1-2026"
USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def chunk(text: str = "", reason: str | None = None, **more: Any) -> bytes:
    delta = {"content": text} if text else {}
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return event({"id": "x", "model": MODEL, "choices": [choice], **more})


def event(said: Any) -> bytes:
    return b"data: " + (said if isinstance(said, bytes) else json.dumps(said).encode()) + b"\n\n"


TOLD = (
    chunk("From"),
    chunk(" elsewhere"),
    chunk(reason="stop"),
    event({"model": MODEL, "choices": [], "usage": USAGE}),
    event(b"[DONE]"),
)


def whole(**more: Any) -> Said:
    message = {"role": "assistant", "content": "From elsewhere"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {"id": "x", "model": MODEL, "choices": [choice], "usage": USAGE, **more}

    async def say(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body)

    return say


def streams(*pieces: bytes | asyncio.Event, cut: bool = False) -> Said:
    """Sends these; an event is waited for, and `cut` breaks the connection at the end."""

    async def say(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            if isinstance(piece, asyncio.Event):
                await piece.wait()
            else:
                await response.write(piece)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return say


def refuses(status: int, message: str = "no", **headers: str) -> Said:
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def say(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=status, headers=named)

    return say


def never() -> Said:
    """Says nothing until its client leaves."""
    return streams(asyncio.Event())


async def usual(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await (streams(*TOLD) if body.get("stream") else whole())(request, body)


@dataclass
class OpenAiServer:
    """Says what is in `says`, in turn, and then always the usual."""

    says: list[Said] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[OpenAiServer]:
        routes = [
            web.post(f"/v1{path}", self._answer) for path in ("/chat/completions", "/completions")
        ]
        async with serving(*routes) as url:
            self.url = f"{url}/v1"
            yield self

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        say = self.says.pop(0) if self.says else usual
        return await say(request, body)
