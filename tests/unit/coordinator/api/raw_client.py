"""HTTP by hand, for clients that behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.fakes.generator import MODEL
from tests.unit.coordinator.api.harness import Harness


def chat_request(**body: Any) -> bytes:
    """The bytes of a chat request."""
    messages = [{"role": "user", "content": "Hi"}]
    return post("/v1/chat/completions", {"model": MODEL, "messages": messages, **body})


def post(path: str, body: Any) -> bytes:
    """The bytes of a POST."""
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read_until_broken(self) -> bytes:
        """Everything that still comes, however the connection ends."""
        return await self.read_until(None)

    async def read_until(self, end: bytes | None) -> bytes:
        """Everything up to the block that has `end`, or up to the end of the connection."""
        raw = bytearray()
        try:
            while block := await self.reader.read(2**16):
                raw += block
                if end is not None and end in raw[-2 * 2**16 :]:
                    break
        except ConnectionError:
            pass
        return bytes(raw)

    async def close(self) -> None:
        """Go away politely."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def reset(self) -> None:
        """Go away with a RST, as a crashing process does."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.close()


@asynccontextmanager
async def connected(api: Harness, *, receive_buffer: int | None = None) -> AsyncIterator[RawClient]:
    """A connection; the test may close it earlier."""
    plain = socket.socket()
    if receive_buffer is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", api.server.port))
    client = RawClient(*await asyncio.open_connection(sock=plain, limit=receive_buffer or 2**16))
    try:
        yield client
    finally:
        await client.close()
