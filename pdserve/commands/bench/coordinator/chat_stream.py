"""A cheap client of streamed chats: it counts bytes and parses almost nothing.

A client that parses everything it reads takes longer per token than a good coordinator, and would
measure itself. This one records when data arrives, finds token 1 in it, and reads the token count
from the end of the stream. A connection serves one request after the other.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

import msgspec

from pdserve.commands.bench.load.completion_stream import SAID_CHARS, error_in
from pdserve.commands.bench.load.outcome import Outcome
from pdserve.shared.errors import ClusterError, ConfigError

_HEAD_END = b"\r\n\r\n"
_BODY_END = b"0\r\n\r\n"
_DONE = b"data: [DONE]"
_EVENT = b"data: "
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_TEXT = re.compile(rb'"(?:content|text)":\s?"[^"]')
_NUM_TOKENS = re.compile(rb'"completion_tokens":\s?(\d+)')
_TAIL_BYTES = 2048  # of a stream's end: they contain the token count, or an error


class ChatStream(asyncio.Protocol):
    """One connection to a server, with one request at a time."""

    def __init__(self) -> None:
        self._outcome: Outcome | None = None
        self._ended: asyncio.Future[None] | None = None
        self._tail = b""
        self._status = 0
        self._start_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def hang_up(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether the connection can be used again."""
        return not self._transport.is_closing()

    async def ask(self, request: bytes, outcome: Outcome, start_s: float) -> None:
        """Send a complete HTTP request, and record the result in `outcome`.

        Times are relative to `start_s`. If cancelled or refused, the connection is closed.
        """
        self._outcome, self._start_s = outcome, start_s
        self._tail, self._status = b"", 0
        self._ended = asyncio.get_running_loop().create_future()
        outcome.sent_s = time.perf_counter() - start_s
        self._transport.write(request)
        try:
            await self._ended
        except BaseException:
            self._transport.abort()
            raise
        finally:
            self._ended = self._outcome = None

    def data_received(self, data: bytes) -> None:
        """As asyncio.Protocol."""
        outcome = self._outcome
        if outcome is None:
            return
        now_s = time.perf_counter() - self._start_s
        seen = self._tail + data
        if not self._status and not self._read_head(seen):
            self._tail = seen
            return
        self._tail = seen[-_TAIL_BYTES:]
        if outcome.arrivals_s:
            if _EVENT in data:
                outcome.arrivals_s.append(now_s)
        elif _TEXT.search(seen):
            outcome.arrivals_s.append(now_s)
        if seen.endswith(_BODY_END):
            self._end(outcome)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio.Protocol."""
        if self._outcome is not None:
            self._end(self._outcome)

    def _read_head(self, seen: bytes) -> bool:
        """Whether the status line has arrived, and announces a stream."""
        if _HEAD_END not in seen:
            return False
        status = _STATUS.match(seen)
        self._status = int(status[1]) if status else -1
        if self._status != 200 and self._outcome is not None:
            self._tail = seen
            self._end(self._outcome)
            self._transport.abort()
        return True

    def _end(self, outcome: Outcome) -> None:
        if self._ended is None or self._ended.done():
            return
        self._ended.set_result(None)
        count = _NUM_TOKENS.findall(self._tail)
        outcome.num_received = int(count[-1]) if count else 0
        if self._status == 200 and _DONE in self._tail:
            is_whole = outcome.num_received == outcome.num_output
            outcome.end = "finished" if is_whole else "failed"
            outcome.error = "" if is_whole else f"the stream had {outcome.num_received} tokens"
            return
        outcome.end = "refused" if self._status == 429 else "failed"
        said = error_in(self._tail.rpartition(_HEAD_END)[2]) or "the stream broke off"
        outcome.error = f"{self._status} {said}"[:SAID_CHARS]


class ChatTarget:
    """A server, and the free connections to it."""

    def __init__(self, url: str, model: str, headers: dict[str, str] | None = None) -> None:
        """Raises ConfigError: the URL is not one of plain HTTP."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ConfigError(f"{url!r} is not the URL of a server: write it as http://host:port")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._host, self._port = parts.hostname, parts.port or 80
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._free: list[ChatStream] = []

    def request(self, words: str, num_tokens: int) -> bytes:
        """Encode a request for a streamed chat about `words`."""
        body = msgspec.json.encode(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": words}],
                "max_tokens": num_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def send(self, request: bytes, outcome: Outcome, start_s: float) -> None:
        """As ChatStream.ask, over a free connection or a new one."""
        stream = await self._connection()
        await stream.ask(request, outcome, start_s)
        if stream.is_open:
            self._free.append(stream)

    def close(self) -> None:
        """Close the free connections."""
        for stream in self._free:
            stream.hang_up()
        self._free.clear()

    async def _connection(self) -> ChatStream:
        while self._free:
            stream = self._free.pop()
            if stream.is_open:
                return stream
        loop = asyncio.get_running_loop()
        try:
            _, stream = await loop.create_connection(ChatStream, self._host, self._port)
        except OSError as error:
            raise ClusterError(f"{self.url} cannot be reached: {error}") from error
        return stream


@asynccontextmanager
async def chat_target(
    url: str, model: str, headers: dict[str, str] | None = None
) -> AsyncIterator[ChatTarget]:
    """Yield a server to send chats to; its connections are closed at the end."""
    target = ChatTarget(url, model, headers)
    try:
        yield target
    finally:
        target.close()
