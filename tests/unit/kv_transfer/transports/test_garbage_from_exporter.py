"""A puller whose exporter talks garbage, falls silent or hangs up: an error, in time."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import numpy as np
import pytest

from kv_transfer.links.link import Link
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from kv_transfer.spans.box import KvBox
from kv_transfer.transports.frames import GarbledFrame, PullVerdict
from kv_transfer.transports.interface import Read
from kv_transfer.transports.pull_client import Unanswered, ask
from pdserve.protocol import TransportOffer
from pdserve.shared.errors import PeerLost, TransferError, TransferTimeout
from tests.unit.kv_transfer.pairs import SMALL, open_pair


def frame(body: bytes) -> bytes:
    return b"pdKV" + struct.pack("!I", len(body)) + body


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def link_to(answer: Answer) -> AsyncIterator[tuple[Puller, Link, ExportedPool, bytes]]:
    """A link to a server of the test's making, and a ticket to pull over it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.append(task)
        await answer(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    serving: list[asyncio.Task[None]] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with open_pair("fake") as pair:
            ticket = pair.exporter.issue("r", 0, 8, [1, 2])
            offer = TransportOffer(name="tcp", endpoint=f"{host}:{port}")
            welcome = msgspec.structs.replace(pair.exporter.welcome(), offers=[offer])
            link = await pair.puller.connect(welcome, timeout_s=30)
            yield pair.puller, link, pair.destination, ticket
            await link.close()
        await asyncio.wait(serving)


def answering(*parts: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        for part in parts:
            writer.write(part)
        await writer.drain()
        await reader.read()

    return answer


def verdict(num_bytes: int = 0, code: str = "") -> bytes:
    return frame(msgspec.msgpack.encode(PullVerdict(num_bytes, code, "")))


SIZE = 2 * SMALL.block_bytes


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], PeerLost),
        ([b"pdKV\xff\xff\xff\xff"], PeerLost),
        ([frame(b"\xc1")], PeerLost),
        ([verdict(SIZE + 1)], PeerLost),
        ([verdict(-1)], PeerLost),
        ([verdict(code="no_such_code")], TransferError),
        ([verdict(code="config_error")], TransferError),
        ([verdict(SIZE), bytes(SIZE), b"trailing garbage"], PeerLost),
    ],
)
async def test_an_exporter_that_talks_garbage(
    parts: list[bytes], error: type[TransferError]
) -> None:
    async with link_to(answering(*parts)) as (puller, link, _, ticket):
        with pytest.raises(error):
            await puller.pull(link, ticket, [4, 5], 0, timeout_s=30)
        assert puller.statistics.failed == 1


@pytest.mark.parametrize(
    "parts",
    [[], [verdict(SIZE)[:5]], [verdict(SIZE), bytes(SIZE // 2)], [verdict(SIZE), bytes(SIZE)]],
)
async def test_an_exporter_that_falls_silent(parts: list[bytes]) -> None:
    async with link_to(answering(*parts)) as (puller, link, _, ticket):
        with pytest.raises(TransferTimeout):
            await puller.pull(link, ticket, [4, 5], 0, timeout_s=0.2)
        assert puller.statistics.timeouts == 1


async def test_an_exporter_that_hangs_up_within_the_bytes() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        writer.write(verdict(SIZE) + b"\x11" * (SIZE // 2))
        await writer.drain()

    async with link_to(answer) as (puller, link, pool, ticket):
        with pytest.raises(PeerLost):
            await puller.pull(link, ticket, [4, 5], 0, timeout_s=30)
        assert not pool.data[5].any()


async def test_garbage_is_not_taken_for_silence() -> None:
    """Nothing was received: ask again on another connection. Garbage was: no exporter is there."""
    pool = ExportedPool(1, 8)
    read = Read(b"", KvBox(0, 0, 0, 0, 0, 0), *[np.empty(0)] * 2, np.empty((0, 3)), 0, pool)
    for said, error in ((b"HTTP/1.1 400 Bad Request", GarbledFrame), (b"", Unanswered)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.send(said)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(PeerLost) as caught:
                await ask(ours, read, "there")
            assert type(caught.value) is error
    pool.close()
