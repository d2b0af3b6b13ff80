"""Accepting connections, whatever becomes of one."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from kv_transfer.transports.acceptor import Acceptor


async def test_one_that_cannot_be_served_is_closed_and_the_next_is_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accepted: list[socket.socket] = []

    def admit(sock: socket.socket) -> None:
        if not accepted:
            accepted.append(sock)
            raise RuntimeError("no room")
        sock.send(b"welcome")
        sock.close()

    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = Acceptor(listener, admit)
    address = listener.getsockname()
    said = []
    for _ in range(2):
        reader, writer = await asyncio.open_connection(*address)
        async with asyncio.timeout(30):
            said.append(await reader.read())
        writer.close()
        await writer.wait_closed()
    assert said == [b"", b"welcome"]
    assert "no room" in caplog.text
    await acceptor.close()


async def test_a_process_out_of_descriptors_accepts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, accepted = asyncio.get_running_loop(), asyncio.Queue[socket.socket]()
    accept, has_failed = loop.sock_accept, asyncio.Event()

    async def failing_once(listener: socket.socket) -> tuple[socket.socket, Any]:
        if not has_failed.is_set():
            has_failed.set()
            raise OSError(errno.EMFILE, "too many open files")
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", failing_once)
    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = Acceptor(listener, accepted.put_nowait)
    await has_failed.wait()
    with socket.create_connection(listener.getsockname()):
        async with asyncio.timeout(30):
            (await accepted.get()).close()
    await acceptor.close()
