"""Whatever arrives on a port of an exporter: it is closed, counted, and no more."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec
import numpy as np
import pytest

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.puller import Puller
from kv_transfer.spans import plan
from kv_transfer.transports import pull_server
from kv_transfer.transports.catalog import TransportKind, choose_kinds
from kv_transfer.transports.frames import PullRequest, PullVerdict
from kv_transfer.transports.pull_server import PullLimits
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.tcp_server import TcpServer
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import (
    StaleIncarnation,
    TicketInvalid,
)
from tests.unit.kv_transfer.pairs import LARGE, make_pool, open_pair
from tests.waits import at_its_deadline, leap, turn, until

IDENTITY = KvIdentity("a-model", "main", LARGE)
LIMITS = PullLimits()


def frame(body: bytes, magic: bytes = b"pdKV") -> bytes:
    return magic + struct.pack("!I", len(body)) + body


def request_frame(ticket: bytes, begin: int, end: int) -> bytes:
    layers, heads = LARGE.num_layers, LARGE.num_kv_heads
    return frame(msgspec.msgpack.encode(PullRequest(ticket, begin, end, 0, layers, 0, heads)))


def admission(exporter: Exporter) -> bytes:
    """What a puller with a session says first."""
    return b"pdKV" + exporter.welcome().access


def port_of(exporter: Exporter) -> tuple[str, int]:
    host, _, port = exporter.offers[-1].endpoint.rpartition(":")
    return host, int(port)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@asynccontextmanager
async def tcp_exporter(limits: PullLimits, num_threads: int = 1) -> AsyncIterator[Exporter]:
    pool = make_pool(LARGE, 8, seed=1)
    server = partial(TcpServer, limits=limits, num_threads=num_threads)
    tcp = TransportKind("tcp", server, TcpTransport, frozenset({"cpu"}))
    kinds = [*choose_kinds(["shm"], pool), tcp]
    exporter = Exporter("p0", "life-1", IDENTITY, pool, ManualClock(), kinds)
    await exporter.start("127.0.0.1")
    try:
        yield exporter
    finally:
        await exporter.close()
        pool.close()


async def assert_still_serves(exporter: Exporter) -> None:
    pool = make_pool(LARGE, 4)
    puller = Puller(pool, IDENTITY, host_id(), choose_kinds(["tcp"], pool))
    link = await puller.connect(exporter.welcome(), timeout_s=30)
    served = exporter.statistics.pulls_served
    ticket = exporter.issue("r", 0, LARGE.block_size, [3])
    await puller.pull(link, ticket, [2], 0, timeout_s=30)
    np.testing.assert_array_equal(pool.data[2], exporter.pool.data[3])
    assert exporter.statistics.pulls_served == served + 1
    await link.close()
    await puller.close()
    pool.close()


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(1 << 16),
    "random": os.urandom(1 << 16),
    "another magic": frame(b"x", b"PDKV"),
    "huge length": b"pdKV\xff\xff\xff\xff" + bytes(1 << 16),
    "no msgpack": frame(b"\xc1" * 100),
    "deep msgpack": frame(b"\x91" * 100_000),
    "another struct": frame(msgspec.msgpack.encode(["a", {"b": 1}])),
    "ill encoded text": frame(msgspec.msgpack.encode([0] * 6).replace(b"\x96", b"\x97\xa1\xff")),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_on_the_tcp_port_is_closed_and_counted(garbage: bytes) -> None:
    async with tcp_exporter(PullLimits()) as exporter:
        reader, writer = await asyncio.open_connection(*port_of(exporter))
        writer.write(admission(exporter) + garbage)
        async with asyncio.timeout(30):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        await hang_up(writer)
        assert exporter.statistics.garbage == 1
        await assert_still_serves(exporter)


@pytest.mark.parametrize("half", [b"", b"p", b"pdKV\x00\x00", frame(bytes(1000))[:500]])
async def test_half_a_request_is_closed_at_its_deadline(half: bytes) -> None:
    async with tcp_exporter(LIMITS) as exporter:
        reader, writer = await asyncio.open_connection(*port_of(exporter))
        writer.write(admission(exporter) + half)
        reading = asyncio.ensure_future(reader.read())
        limit_s = LIMITS.request_s if half else LIMITS.idle_s
        assert await at_its_deadline(reading, limit_s) == b""
        await hang_up(writer)
        assert exporter.statistics.garbage == (1 if half else 0)
        await assert_still_serves(exporter)


async def test_an_idle_connection_is_closed_at_its_deadline() -> None:
    async with tcp_exporter(LIMITS) as exporter:
        reader, writer = await asyncio.open_connection(*port_of(exporter))
        writer.write(admission(exporter) + request_frame(exporter.issue("r", 0, 1, [3]), 0, 1))
        reading = asyncio.ensure_future(reader.read())
        await until(lambda: exporter.statistics.pulls_served == 1)
        assert len(await at_its_deadline(reading, LIMITS.idle_s)) > LARGE.token_bytes
        await hang_up(writer)
        assert exporter.statistics.garbage == 0


async def test_a_puller_asks_again_when_its_idle_connection_was_closed() -> None:
    pool = make_pool(LARGE, 4)
    puller = Puller(pool, IDENTITY, host_id(), choose_kinds(["tcp"], pool))
    async with tcp_exporter(LIMITS) as exporter:
        link = await puller.connect(exporter.welcome(), timeout_s=30)
        for _ in range(2):
            leap(LIMITS.idle_s)
            await turn()
            await puller.pull(link, exporter.issue("r", 0, 64, [3]), [2], 0, timeout_s=30)
        await link.close()
        assert (pool.data[2] == exporter.pool.data[3]).all()
    assert (puller.statistics.pulls, puller.statistics.retried) == (2, 0)
    await puller.close()
    pool.close()


async def test_silent_connections_do_not_keep_pullers_out() -> None:
    limits = PullLimits(max_connections=4)
    async with tcp_exporter(limits) as exporter:
        silent = [await asyncio.open_connection(*port_of(exporter)) for _ in range(12)]
        await assert_still_serves(exporter)
        assert exporter.statistics.turned_away == 9
        for _, writer in silent:
            await hang_up(writer)


async def test_idle_pullers_make_room_and_ask_again() -> None:
    async with tcp_exporter(PullLimits(max_connections=2)) as exporter:
        pool = make_pool(LARGE, 4)
        puller = Puller(pool, IDENTITY, host_id(), choose_kinds(["tcp"], pool))
        links = [await puller.connect(exporter.welcome(), timeout_s=30) for _ in range(4)]
        for link in links * 2:
            await puller.pull(link, exporter.issue("r", 0, 64, [3]), [2], 0, timeout_s=30)
        for link in links:
            await link.close()
        assert (puller.statistics.pulls, puller.statistics.retried) == (8, 0)
        assert exporter.statistics.turned_away > 0
        await puller.close()
        pool.close()


async def test_a_full_table_of_pulls_turns_newcomers_away() -> None:
    async with tcp_exporter(PullLimits(max_connections=1)) as exporter:
        endless = exporter.issue("r", 0, 6000 * LARGE.block_size, [1] * 6000)
        served, hung = await asyncio.open_connection(*port_of(exporter), limit=1024)
        hung.write(admission(exporter) + request_frame(endless, 0, 6000 * LARGE.block_size))
        await served.readexactly(1)
        reader, writer = await asyncio.open_connection(*port_of(exporter))
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        assert exporter.statistics.turned_away == 1
        await hang_up(hung)
        await hang_up(writer)


async def test_a_hung_puller_takes_no_thread_and_is_closed_at_its_deadline() -> None:
    async with tcp_exporter(LIMITS, num_threads=1) as exporter:
        endless = exporter.issue("r", 0, 6000 * LARGE.block_size, [1] * 6000)
        hung = [await asyncio.open_connection(*port_of(exporter), limit=1024) for _ in range(3)]
        for reader, writer in hung:
            request = request_frame(endless, 0, 6000 * LARGE.block_size)
            writer.write(admission(exporter) + request)
            await reader.readexactly(1)
        await assert_still_serves(exporter)
        assert exporter.statistics.broken == 0
        while exporter.statistics.broken < 3:
            await asyncio.sleep(0.005)
            leap(LIMITS.stall_s)
        for _, writer in hung:
            await hang_up(writer)


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 200), (-1, 5), (5, 5), (7, 3), (1 << 62, 1 << 63), (64, 129)]
)
async def test_a_range_outside_of_the_ticket_is_refused(begin: int, end: int) -> None:
    async with tcp_exporter(PullLimits()) as exporter:
        ticket = exporter.issue("r", 64, 64, [3])
        asked = request_frame(ticket, begin, end)
        assert (await ask(exporter, asked)).code == TicketInvalid.code
        assert exporter.statistics.refused == 1


def one_head_of(ticket: bytes, num_blocks: int) -> bytes:
    end = num_blocks * LARGE.block_size
    request = PullRequest(ticket, 0, end, 0, LARGE.num_layers, 0, 1)
    return frame(msgspec.msgpack.encode(request))


async def test_more_single_rows_than_can_be_planned_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "_MAX_ROWS", 100)
    async with tcp_exporter(PullLimits()) as exporter:
        ticket = exporter.issue("r", 0, 20 * LARGE.block_size, [1] * 20)
        assert (await ask(exporter, one_head_of(ticket, 20))).code == TicketInvalid.code
        assert (await ask(exporter, one_head_of(ticket, 2))).code == ""
        assert exporter.statistics.refused == 1


async def test_many_single_rows_are_not_planned_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    def source_ranges(run: plan.BlockRun, box: plan.KvBox) -> plan.Spans:
        threads.append(threading.current_thread().name)
        return plan.source_ranges(run, box)

    monkeypatch.setattr(pull_server, "source_ranges", source_ranges)
    async with tcp_exporter(PullLimits()) as exporter:
        for num_blocks in (1, 2000):
            ticket = exporter.issue("r", 0, num_blocks * LARGE.block_size, [1] * num_blocks)
            assert (await ask(exporter, one_head_of(ticket, num_blocks))).code == ""
    assert threads == [threading.main_thread().name, "kv-send_0"]


async def ask(exporter: Exporter, request: bytes) -> PullVerdict:
    """The first answer."""
    reader, writer = await asyncio.open_connection(*port_of(exporter))
    writer.write(admission(exporter) + request)
    async with asyncio.timeout(30):
        _, length = struct.unpack("!4sI", await reader.readexactly(8))
        verdict = msgspec.msgpack.decode(await reader.readexactly(length), type=PullVerdict)
    await hang_up(writer)
    return verdict


async def test_bad_tickets_are_refused_and_counted() -> None:
    async with tcp_exporter(PullLimits()) as exporter, open_pair("fake", LARGE) as other:
        good = exporter.issue("r", 0, 64, [3])
        for bad in (b"", good[:-1], good[:-1] + b"\0", other.exporter.issue("r", 0, 64, [3])):
            assert (await ask(exporter, request_frame(bad, 0, 64))).code == TicketInvalid.code
        other.exporter.incarnation = "life-0"
        former = other.exporter.issue("r", 0, 64, [3])
        assert (await ask(exporter, request_frame(former, 0, 64))).code == StaleIncarnation.code
        assert exporter.statistics.refused == 5
        await assert_still_serves(exporter)


async def test_garbage_on_the_unix_socket() -> None:
    async with tcp_exporter(PullLimits()) as exporter:
        for garbage in (b"", b"x", bytes(100_000)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(f"\0{exporter.offers[0].endpoint}")
                sock.setblocking(False)
                try:
                    sock.send(garbage)
                except (BlockingIOError, ConnectionError):
                    continue
        puller = Puller(make_pool(LARGE, 4), IDENTITY, host_id())
        link = await puller.connect(exporter.welcome(), timeout_s=30)
        assert link.transport == "shm"
        await link.close()
        await puller.close()


async def test_running_out_of_descriptors_is_survived() -> None:
    async with tcp_exporter(PullLimits()) as exporter:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.create_connection(port_of(exporter)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                await asyncio.sleep(0.05)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await assert_still_serves(exporter)
