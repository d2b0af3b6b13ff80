"""A chat server with almost no cost: every answer repeats one token, once per step.

It serves three purposes: the overhead of a coordinator is measured against direct calls to it, it
is the upstream of other servers that need an OpenAI API, and what a client can read from it is that
client's own limit. So it understands only what is sent to it here: POST with a Content-Length for
an answer, streamed or not, of `max_tokens` tokens, and GET for the list of models.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import cast

import msgspec

from pdserve.commands.bench.coordinator.simulated_node import Beat

MODEL = "simulated"

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_JSON_HEAD = b"HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_TEXT = " token"


def _event(choices: list[dict[str, object]], **more: object) -> bytes:
    chunk = {
        "id": "chatcmpl-simulated",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": choices,
        **more,
    }
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _delta(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    return _event([{"index": 0, "delta": delta, "finish_reason": finish_reason}])


def _chunked(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


_TOKEN = _delta({"content": _TEXT})
_FIRST = _chunked(_delta({"role": "assistant", "content": ""}) + _TOKEN)
_NEXT = _chunked(_TOKEN)


def _last(num_tokens: int) -> bytes:
    """Return the end of a stream, after its last token."""
    counts = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}
    end = _delta({}, "length") + _event([], usage=counts) + b"data: [DONE]\n\n"
    return _chunked(end) + b"0\r\n\r\n"


class _Wanted(msgspec.Struct):
    max_tokens: int = 1
    max_completion_tokens: int = 0  # as some gateways write it
    stream: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens


@dataclass(slots=True, eq=False)
class _Stream:
    """An answer in progress."""

    connection: _Connection
    num_tokens: int
    num_sent: int = 0


class SseServer:
    """Sends token 1 at once, and then one token of each stream at every step."""

    def __init__(self, beat: Beat) -> None:
        self._streams: list[_Stream] = []
        beat.listen(self._step)

    async def start(self, port: int) -> asyncio.Server:
        """Start listening."""
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: _Connection(self), "127.0.0.1", port)

    def begin(self, connection: _Connection, num_tokens: int) -> None:
        """Stream `num_tokens` tokens to a connection."""
        connection.write(_STREAM_HEAD + _FIRST)
        stream = _Stream(connection, num_tokens, 1)
        if num_tokens > 1:
            self._streams.append(stream)
        else:
            connection.write(_last(1))

    def _step(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.num_sent += 1
            is_last = stream.num_sent == stream.num_tokens
            is_open = stream.connection.write(
                _NEXT + _last(stream.num_tokens) if is_last else _NEXT
            )
            if is_open and not is_last:
                self._streams.append(stream)


class _Connection(asyncio.Protocol):
    """A connection that serves one request after the other."""

    def __init__(self, server: SseServer) -> None:
        self._server = server
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(_HEAD_END)) >= 0:
            head, rest = self._received[:end], self._received[end + len(_HEAD_END) :]
            length = _LENGTH.search(head)
            num_body = int(length[1]) if length else 0
            if len(rest) < num_body:
                return
            self._received = rest[num_body:]
            self._answer(head, rest[:num_body])

    def write(self, text: bytes) -> bool:
        """Write to the client; returns whether it is still connected."""
        if self._transport.is_closing():
            return False
        self._transport.write(text)
        return True

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET "):
            self._json(200, b"OK", {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            return
        try:
            wanted = msgspec.json.decode(body, type=_Wanted)
        except msgspec.DecodeError as error:
            self._json(400, b"Bad Request", {"error": {"message": str(error)}})
            return
        if wanted.stream:
            self._server.begin(self, wanted.num_tokens)
        else:
            self._json(200, b"OK", _whole(wanted.num_tokens))

    def _json(self, status: int, reason: bytes, answer: object) -> None:
        body = msgspec.json.encode(answer)
        self.write(_JSON_HEAD % (status, reason, len(body)) + body)


def _whole(num_tokens: int) -> dict[str, object]:
    message = {"role": "assistant", "content": _TEXT * num_tokens}
    return {
        "id": "chatcmpl-simulated",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": num_tokens,
            "total_tokens": num_tokens + 1,
        },
    }
