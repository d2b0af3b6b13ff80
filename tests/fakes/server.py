"""A server of completions that only pretends: what it says is up to the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from pdserve.commands.bench.load.workload import TimedRequest
from pdserve.shared.errors import ClusterError
from tests.fakes.http import serving

Body = dict[str, Any]
Answer = Callable[[web.Request, Body], Awaitable[web.StreamResponse]]


def timed(at_s: float = 0.0, num_prompt: int = 4, num_output: int = 3) -> TimedRequest:
    return TimedRequest(at_s, "chat", [20 + i for i in range(num_prompt)], num_output)


def token(text: str = "a", fingerprint: str | None = None) -> bytes:
    event = {"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None}
    event |= {"system_fingerprint": fingerprint} if fingerprint else {}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def end(num_tokens: int, num_prompt: int = 1) -> bytes:
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    return (
        b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
    )


def end_of(body: Body) -> bytes:
    """With the true counts."""
    return end(body["max_tokens"], len(body["prompt"]))


def error(code: str) -> bytes:
    return b'data: {"error": {"message": "it broke", "code": "%s"}}\n\n' % code.encode()


async def stream(request: web.Request, *pieces: bytes) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"x-pdserve-prefill-node": "p", "x-pdserve-decode-node": "d"}
    )
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)
    await response.write_eof()
    return response


async def answer_all(request: web.Request, body: Body) -> web.StreamResponse:
    """As asked for, a token a piece."""
    tokens = [token()] * body["max_tokens"]
    return await stream(request, *tokens, end_of(body))


@dataclass
class FakeServer:
    """Counts as a `contest.Server` while it is running."""

    answer: Answer = answer_all
    bodies: list[Body] = field(default_factory=list)
    url: str = ""
    model: str = "m"
    max_model_len: int = 8192
    settles: bool = True
    is_paused: bool = False

    async def settle(self) -> None:
        if not self.settles and any("-rate-" in body["cache_salt"] for body in self.bodies):
            raise ClusterError("a request hangs")

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[FakeServer]:
        complete = web.post("/v1/completions", self._complete)
        async with serving(complete, web.get("/v1/models", self._models), port=port) as self.url:
            yield self

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        return await self.answer(request, body)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": self.model}]})
