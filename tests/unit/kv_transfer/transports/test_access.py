"""Who has no open session gets nothing out of any transport, and costs next to nothing."""

from __future__ import annotations

import asyncio
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
import pytest
from msgspec.structs import replace

from kv_transfer.handshake import ACCESS_BYTES, AccessTokens
from kv_transfer.transports.frames import MAX_REQUEST_BYTES, PullRequest
from pdserve.protocol import ExporterWelcome
from pdserve.shared.errors import AccessDenied, PeerLost
from tests.matrix import matrix
from tests.unit.kv_transfer.pairs import TRANSPORTS, Pair, open_pair

OTHER = bytes(range(ACCESS_BYTES))
MUCH = b"\x00" * (1 << 20)


@pytest.fixture(params=TRANSPORTS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with open_pair(request.param) as opened:
        yield opened


# ---- tokens ------------------------------------------------------------------------------------


def test_a_token_is_good_until_it_is_revoked() -> None:
    tokens = AccessTokens()
    first, second = tokens.grant(), tokens.grant()
    assert first != second
    assert len(first) == ACCESS_BYTES
    tokens.check(first)
    tokens.revoke(first)
    tokens.revoke(first)
    tokens.check(second)
    for token in (first, b"", OTHER, second[:-1], second + b"x"):
        with pytest.raises(AccessDenied):
            tokens.check(token)


def test_a_refusal_does_not_show_the_token() -> None:
    with pytest.raises(AccessDenied) as caught:
        AccessTokens().check(b"a secret")
    assert "secret" not in str(caught.value)


# ---- a link ------------------------------------------------------------------------------------


async def connect_and_pull(pair: Pair, welcome: ExporterWelcome, ticket: bytes) -> None:
    """Some transports refuse at once, some at the first read."""
    link = await pair.puller.connect(welcome, timeout_s=30)
    try:
        await pair.puller.pull(link, ticket, [7], 0, timeout_s=30)
    finally:
        await link.close()


@pytest.mark.parametrize("access", matrix([OTHER, OTHER + OTHER, bytes(ACCESS_BYTES)], 1))
async def test_a_wrong_token_pulls_nothing(pair: Pair, access: bytes) -> None:
    welcome = replace(pair.exporter.welcome(), access=access)
    ticket = pair.exporter.issue("r", 0, 4, [5])
    with pytest.raises(PeerLost):
        await connect_and_pull(pair, welcome, ticket)
    assert not pair.destination.data.any()
    statistics = pair.exporter.statistics
    assert statistics.pulls_served == 0
    assert statistics.refused > 0
    await pair.pull(ticket, [7])  # who has a session is served as before


async def test_a_revoked_token_opens_no_new_connection(pair: Pair) -> None:
    welcome = pair.exporter.welcome()
    pair.exporter.dismiss(welcome)
    ticket = pair.exporter.issue("r", 0, 4, [5])
    with pytest.raises(PeerLost):
        await connect_and_pull(pair, welcome, ticket)
    assert pair.exporter.statistics.refused > 0
    assert not pair.destination.data.any()


async def test_an_idle_connection_ends_with_its_session() -> None:
    async with open_pair("tcp") as pair:
        ticket = pair.exporter.issue("r", 0, 4, [5])
        await pair.pull(ticket, [7])
        pair.exporter.dismiss(pair.link.welcome)
        with pytest.raises(AccessDenied):
            await pair.pull(ticket, [8])
        assert not pair.destination.data[8].any()
        assert pair.exporter.statistics.refused == 1
        with pytest.raises(PeerLost):  # nor is the next connection let in
            await pair.pull(ticket, [8])


async def test_a_pull_in_flight_when_the_session_ends_is_complete() -> None:
    async with open_pair("fake") as pair:
        pair.network.pause()
        task = asyncio.create_task(pair.pull(pair.exporter.issue("r", 0, 4, [5]), [7]))
        await asyncio.sleep(0)
        pair.exporter.dismiss(pair.link.welcome)
        pair.network.resume()
        await task
        assert (pair.destination.data[7] == pair.source.data[5]).all()


# ---- what is read of strangers -----------------------------------------------------------------


def connected(pair: Pair) -> socket.socket:
    """A connection to the one transport that is offered."""
    (offer,) = pair.exporter.offers
    if offer.name == "shm":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(f"\0{offer.endpoint}")
    else:
        host, _, port = offer.endpoint.rpartition(":")
        sock = socket.create_connection((host, int(port)))
    sock.setblocking(False)
    return sock


async def until_closed(sock: socket.socket) -> bytes:
    """What comes before the other end hangs up, in whatever way it does."""
    received = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(30):
            while part := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                received += part
    return received


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize(
    "greeting", [b"pdKV" + OTHER, b"pdKV" + bytes(ACCESS_BYTES), MUCH, b"GET / HTTP/1.1\r\n" * 9]
)
async def test_a_stranger_is_told_nothing_and_read_no_further(kind: str, greeting: bytes) -> None:
    async with open_pair(kind) as pair:
        said = greeting + MUCH
        with connected(pair) as sock:
            closed = asyncio.create_task(until_closed(sock))
            tracemalloc.start()
            try:
                with suppress(ConnectionError):
                    await asyncio.get_running_loop().sock_sendall(sock, said)
                assert await closed == b""
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert peak < len(MUCH) // 4
        assert pair.exporter.statistics.refused + pair.exporter.statistics.garbage == 1
        await pair.pull(pair.exporter.issue("r", 0, 4, [5]), [7])


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_stranger_with_a_valid_ticket_is_refused(kind: str) -> None:
    """A ticket alone, seen on the wire say, opens nothing."""
    async with open_pair(kind) as pair:
        request = PullRequest(pair.exporter.issue("r", 0, 4, [5]), 0, 4, 0, 2, 0, 2)
        body = msgspec.msgpack.encode(request)
        frame = b"pdKV" + struct.pack("!I", len(body)) + body
        assert len(frame) > 4 + ACCESS_BYTES
        with connected(pair) as sock:
            await asyncio.get_running_loop().sock_sendall(sock, frame)
            assert await until_closed(sock) == b""
        assert pair.exporter.statistics.refused == 1
        assert pair.exporter.statistics.pulls_served == 0


async def test_after_a_refusal_an_idle_connection_is_closed() -> None:
    async with open_pair("tcp") as pair:
        welcome = pair.exporter.welcome()
        request = PullRequest(pair.exporter.issue("r", 0, 4, [5]), 0, 4, 0, 2, 0, 2)
        body = msgspec.msgpack.encode(request)
        frame = b"pdKV" + struct.pack("!I", len(body)) + body
        loop = asyncio.get_running_loop()
        with connected(pair) as sock:
            await loop.sock_sendall(sock, b"pdKV" + welcome.access + frame)
            async with asyncio.timeout(30):
                while pair.exporter.statistics.pulls_served == 0:
                    await asyncio.sleep(0.001)
            pair.exporter.dismiss(welcome)
            await loop.sock_sendall(sock, frame)
            said = await until_closed(sock)
        _, first, last = said.partition(b"access_denied")
        assert first
        assert b"pdKV" not in last
        assert said.count(b"pdKV") == 3  # go ahead, valid, refused


@pytest.mark.parametrize("length", [MAX_REQUEST_BYTES + 1, (1 << 32) - 1])
async def test_a_length_that_lies_reserves_nothing(length: int) -> None:
    async with open_pair("tcp") as pair:
        access = pair.exporter.welcome().access
        tracemalloc.start()
        try:
            with connected(pair) as sock:
                said = b"pdKV" + access + b"pdKV" + struct.pack("!I", length)
                await asyncio.get_running_loop().sock_sendall(sock, said)
                assert await until_closed(sock) == b""
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20
        assert pair.exporter.statistics.garbage == 1


async def test_a_length_within_bounds_reserves_only_what_comes() -> None:
    async with open_pair("tcp") as pair:
        access = pair.exporter.welcome().access
        tracemalloc.start()
        try:
            with connected(pair) as sock:
                said = b"pdKV" + access + b"pdKV" + struct.pack("!I", MAX_REQUEST_BYTES) + b"x"
                await asyncio.get_running_loop().sock_sendall(sock, said)
                await asyncio.sleep(0.05)
                _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20
        await pair.pull(pair.exporter.issue("r", 0, 4, [5]), [7])
