"""What is sent and not read: how much there may be, and who gives way."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from coordinator.api.read.body_budget import SLOW_S, WAIT_S, BodyBudget
from coordinator.api.server.outbox import FULL, PIECE_BYTES, HttpOutbox
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.stored import EventLog, StoredResponse
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import BuffersFull
from tests.unit.coordinator.api.harness import served
from tests.unit.coordinator.api.raw_client import connected

TOTAL = 32 * PIECE_BYTES


class Client:
    """One that reads only when it is told to, behind an outbox."""

    def __init__(self, budget: BodyBudget, payer: str) -> None:
        self.num_unread = self.num_read = 0
        self.is_aborted = False
        self._has_read = asyncio.Event()
        transport: Any = self
        self.outbox = HttpOutbox(transport, budget, payer, stall_timeout_s=60.0)

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted, self.num_unread = True, 0
        self._has_read.set()

    async def write(self, piece: bytes | memoryview) -> None:
        """As a transport: at once, and then wait if too much is unread."""
        self.num_unread += len(piece)
        while self.num_unread > 2 * PIECE_BYTES:
            self._has_read.clear()
            await self._has_read.wait()
        if self.is_aborted:
            raise ConnectionResetError

    def read(self) -> None:
        self.num_read += self.num_unread
        self.num_unread = 0
        self._has_read.set()
        self.outbox.drained()


class Crowd:
    """Clients, and what is sent to them."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.clock = ManualClock()
        self.budget = BodyBudget(TOTAL, self.clock, FULL, spares=True, wait_s=wait_s)
        self.clients: list[Client] = []
        self.sending: list[asyncio.Task[None]] = []

    def send(self, payer: str, num_bytes: int) -> Client:
        client = Client(self.budget, payer)
        self.clients.append(client)
        sending = asyncio.ensure_future(client.outbox.send(client.write, bytes(num_bytes)))
        self.sending.append(sending)
        return client

    @property
    def num_unread(self) -> int:
        return sum(client.num_unread for client in self.clients)

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def end(self) -> None:
        for client in self.clients:
            client.abort()
            client.outbox.close()
        for sending in self.sending:
            sending.cancel()
        await asyncio.gather(*self.sending, return_exceptions=True)
        assert self.budget.num_bytes == 0


async def test_who_does_not_read_fills_a_share_and_others_are_served() -> None:
    crowd = Crowd()
    for _ in range(100):
        crowd.send("eve", 100 * PIECE_BYTES)
    await crowd.settle()
    assert TOTAL // 4 < crowd.num_unread <= TOTAL // 2
    assert all(client.num_unread <= 3 * PIECE_BYTES for client in crowd.clients)
    reader = crowd.send("ann", 50 * PIECE_BYTES)
    while reader.num_read < 50 * PIECE_BYTES:
        await crowd.settle()
        reader.read()
    await crowd.end()


async def test_the_slow_give_way_for_lack_of_space() -> None:
    crowd = Crowd()
    for _ in range(5):
        crowd.send("eve", 10 * PIECE_BYTES)
    await crowd.settle()
    quick = crowd.clients[0]
    crowd.clock.advance(2 * SLOW_S)
    quick.read()
    await crowd.settle()
    other = Client(crowd.budget, "eve")
    crowd.clients.append(other)
    async with asyncio.timeout(WAIT_S / 2):
        await other.outbox.reserve(4 * PIECE_BYTES)
    assert any(client.is_aborted for client in crowd.clients)
    assert not quick.is_aborted
    await crowd.end()


async def test_a_lost_connection_that_waits_for_space_holds_nothing() -> None:
    """What is given back goes neither to itself nor to another that is lost as well."""
    crowd = Crowd()
    first, second = (Client(crowd.budget, "eve") for _ in range(2))
    await first.outbox.reserve(TOTAL // 4)
    await second.outbox.reserve(TOTAL // 8)
    for client in (first, second):
        crowd.sending.append(asyncio.ensure_future(client.outbox.reserve(TOTAL // 2)))
    await crowd.settle()
    for client in (second, first):
        client.outbox.close()
    await crowd.end()


async def test_a_body_waits_for_space_before_it_is_made() -> None:
    crowd = Crowd(wait_s=0.01)
    first, second = (Client(crowd.budget, "eve") for _ in range(2))
    crowd.clients += [first, second]
    await first.outbox.reserve(100 * TOTAL)  # more than there ever is: it is alone
    with pytest.raises(BuffersFull, match="answers that are not read"):
        await second.outbox.reserve(1)
    response = web.Response(body=bytes(PIECE_BYTES))
    await first.outbox.fit(response)  # reserved already
    first.outbox.end_of_answer()
    await second.outbox.fit(response)
    assert second.outbox.num_unread == 0 or response.body is not None
    await crowd.end()


async def test_a_stream_is_replayed_as_it_is_read() -> None:
    """Forty that ask for eight megabytes and do not read; and one that does."""
    log, store = EventLog(), ResponseStore()
    log.add(
        [b"data: " + bytes([65 + i % 26]) * (1 + 977 * i % 60_000) + b"\n\n" for i in range(300)]
    )
    log.close()
    stored = StoredResponse(
        id=f"resp_{'0' * 32}",
        owner="",
        body=b"{}",
        items=(),
        num_input_items=0,
        items_bytes=0,
        is_background=True,
        log=log,
    )
    store.put(stored)
    path = f"/v1/responses/{stored.id}?stream=true"
    async with served(store=store, max_unread_bytes=TOTAL) as api, AsyncExitStack() as stack:
        tracemalloc.start()
        try:
            for _ in range(40):
                client = await stack.enter_async_context(connected(api, receive_buffer=4096))
                client.writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            for _ in range(20):
                await asyncio.sleep(0.01)  # while they are sent what they may be
            num_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert num_bytes < 4 * TOTAL
    async with served(store=store) as api, api.client.get(path) as response:
        assert await response.read() == b"".join(log.events)
