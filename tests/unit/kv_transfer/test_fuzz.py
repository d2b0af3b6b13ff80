"""Random and mutated bytes on everything here that reads from a peer: a typed error, or a message.

What is not expected would show as another exception, in the parser or in the server's task.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kv_transfer.ticket import MAC_BYTES, Ticket, TicketSealer, read_ticket
from kv_transfer.transports.frames import (
    MAX_REQUEST_BYTES,
    MAX_VERDICT_BYTES,
    PullRequest,
    PullVerdict,
    receive_access,
    receive_frame,
)
from kv_transfer.transports.pool_share import (
    _DESCRIPTION_BYTES,
    PoolDescription,
    _receive_descriptor,
)
from kv_transfer.transports.pull_client import dial
from pdserve.protocol import TransportOffer
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import PeerLost, StaleIncarnation, TicketInvalid, TransferError
from tests.matrix import examples
from tests.unit.kv_transfer.pairs import SMALL, Pair, open_pair

FUZZ = settings(max_examples=examples(200))
SERVED = settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
T = TypeVar("T")

# Anything that MessagePack can say, nested too.
plain = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
content = st.recursive(
    plain | st.text(max_size=9) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)
packed = content.map(msgspec.msgpack.encode)


def frame(body: bytes) -> bytes:
    return b"pdKV" + struct.pack("!I", len(body)) + body


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """Something like `valid`: bits flipped, parts cut out, doubled, or replaced by noise."""
    said = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(said)))
        end = draw(st.integers(begin, min(len(said), begin + 40)))
        match draw(st.sampled_from(["flip", "cut", "double", "noise", "end"])):
            case "flip" if begin < len(said):
                said[begin] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del said[begin:end]
            case "double":
                said[begin:begin] = said[begin:end]
            case "noise":
                said[begin:end] = draw(st.binary(max_size=20))
            case "end":
                del said[begin:]
    return bytes(said)


def heard(said: bytes, receive: Callable[[socket.socket], Awaitable[T]]) -> T | None:
    """What a receiver makes of these bytes and the end of the stream; None: a typed error."""

    async def scenario() -> T | None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(said) + 1)
            theirs.sendall(said)
            theirs.shutdown(socket.SHUT_WR)
            try:
                async with asyncio.timeout(30):
                    return await receive(ours)
            except PeerLost:
                return None

    return asyncio.run(scenario())


# ---- parsers -----------------------------------------------------------------------------------

REQUEST = PullRequest(b"a ticket", 0, 4, 0, 2, 0, 2)
VERDICT = PullVerdict(num_bytes=7, code="stale_ticket", message="gone")


@FUZZ
@given(st.binary(max_size=80) | mutated(b"pdKV" + bytes(range(32))))
def test_an_access_token_is_read_or_refused(said: bytes) -> None:
    token = heard(said, receive_access)
    assert (token is not None) == (said.startswith(b"pdKV") and len(said) >= 36)
    assert token is None or token == said[4:36]


@FUZZ
@given(
    st.binary(max_size=80)
    | packed.map(frame)
    | mutated(frame(msgspec.msgpack.encode(REQUEST)))
    | st.tuples(st.integers(0, (1 << 32) - 1), st.binary(max_size=50)).map(
        lambda lie: b"pdKV" + struct.pack("!I", lie[0]) + lie[1]
    )
)
def test_a_request_is_read_or_refused(said: bytes) -> None:
    request = heard(said, lambda sock: receive_frame(sock, PullRequest, MAX_REQUEST_BYTES))
    if request is not None:
        assert isinstance(request.ticket, bytes)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=PullRequest) == request


@FUZZ
@given(
    st.binary(max_size=80)
    | packed.map(frame)
    | mutated(frame(msgspec.msgpack.encode(VERDICT)))
    | st.builds(
        PullVerdict, st.integers(-9, 1 << 63), st.text(max_size=9), st.text(max_size=9)
    ).map(lambda verdict: frame(msgspec.msgpack.encode(verdict)))
)
def test_a_verdict_is_read_or_refused(said: bytes) -> None:
    verdict = heard(said, lambda sock: receive_frame(sock, PullVerdict, MAX_VERDICT_BYTES))
    if verdict is not None and verdict.code:
        with pytest.raises((TransferError, StaleIncarnation)):
            verdict.check()


@pytest.mark.parametrize("inner", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xc7\x01"])
@pytest.mark.parametrize(
    ("kind", "valid"), [(PullRequest, REQUEST), (PullVerdict, VERDICT)], ids=["request", "verdict"]
)
def test_depth_where_a_field_or_one_more_is_expected(
    kind: type[PullRequest] | type[PullVerdict], valid: msgspec.Struct, inner: bytes
) -> None:
    encoded = msgspec.msgpack.encode(valid)
    count = encoded[0] & 0x0F
    deep = inner * (3000 // len(inner))
    for body in (deep, encoded[:1] + deep, bytes([0x90 | count + 1]) + encoded[1:] + deep):
        assert heard(frame(body), lambda sock: receive_frame(sock, kind, 4096)) is None


@FUZZ
@given(
    st.binary(max_size=_DESCRIPTION_BYTES)
    | packed
    | mutated(msgspec.msgpack.encode(PoolDescription(3, 64)))
)
def test_a_description_of_a_pool_is_read_or_refused_and_leaks_no_descriptor(said: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, open(os.devnull) as handed_over:
        fds = [handed_over.fileno()]
        socket.send_fds(theirs, [said or b"\0"], fds)
        with suppress(PeerLost):
            description, fd = _receive_descriptor(ours)
            os.close(fd)
            assert isinstance(description, PoolDescription)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("num_fds", [0, 2, 5])
def test_another_number_of_descriptors(num_fds: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, open(os.devnull) as handed_over:
        description = msgspec.msgpack.encode(PoolDescription(3, 64))
        socket.send_fds(theirs, [description], [handed_over.fileno()] * num_fds)
        if num_fds == 0:
            with pytest.raises(PeerLost, match="0 descriptors"):
                _receive_descriptor(ours)
        else:
            os.close(_receive_descriptor(ours)[1])  # the kernel keeps the others back
    assert len(os.listdir("/proc/self/fd")) == before


ENDPOINTS = st.text(max_size=30) | st.sampled_from(
    [
        "127.0.0.1:99999",
        f"127.0.0.1:{10**40}",
        "127.0.0.1:-1",
        "127.0.0.1:0",
        "[::1]:1",
        "a\0b:1",
        f"{'x' * 300}:1",
        ":1",
        "127.0.0.1:\u0661",
    ]
)


@settings(max_examples=examples(50))
@given(ENDPOINTS)
def test_dialling_a_garbled_endpoint_finds_nobody(endpoint: str) -> None:
    async def scenario() -> None:
        with suppress(PeerLost):
            (await dial(endpoint, bytes(32), None)).close()

    asyncio.run(scenario())


# ---- tickets -----------------------------------------------------------------------------------

SEALER = TicketSealer("life-1", ManualClock(100.0))
names = st.text(max_size=4) | st.sampled_from(["p0", "life-1"])
numbers = st.integers(0, 40) | st.integers(0, 1 << 40)
random_tickets = st.builds(
    Ticket,
    version=st.sampled_from([2, 3]),
    node_id=names,
    incarnation=names,
    request_id=names,
    fingerprint=names,
    first_token=numbers,
    num_tokens=numbers,
    block_ids=st.lists(st.integers(0, 40) | st.integers(0, (1 << 40) - 1), max_size=6),
    generations=st.lists(st.integers(0, (1 << 64) - 1), max_size=6),
    first_layer=numbers,
    end_layer=numbers,
    checksums=st.binary(max_size=100) | st.lists(st.integers(0, (1 << 64) - 1), max_size=12),
    expires_at_s=st.floats(),
)


def sealed(request_id: str) -> bytes:
    return SEALER.seal(
        Ticket(2, "p0", "life-1", request_id, "f", 0, 8, [1, 2], [0, 0], 0, 2, [1, 2, 3, 4], 200.0)
    )


@FUZZ
@given(mutated(sealed("r")) | st.binary(max_size=300) | packed.map(lambda b: b + bytes(MAC_BYTES)))
def test_no_changed_ticket_opens(said: bytes) -> None:
    if said == sealed("r"):
        return  # what was cut and doubled may come out as it was
    with pytest.raises((TicketInvalid, StaleIncarnation)):
        SEALER.open(said)
    with suppress(TicketInvalid):
        assert isinstance(read_ticket(said), Ticket)


@given(st.integers(0, len(sealed("r"))))
def test_a_ticket_spliced_of_two_is_refused(cut: int) -> None:
    one, other = sealed("one"), sealed("two")
    spliced = one[:cut] + other[cut:]
    assert len(one) == len(other)
    if spliced in (one, other):
        return
    with pytest.raises(TicketInvalid):
        SEALER.open(spliced)


@given(random_tickets)
def test_a_ticket_that_passes_fits_the_pool(ticket: Ticket) -> None:
    try:
        ticket.check(32, SMALL)
    except TicketInvalid:
        return
    ids, generations = ticket.blocks_between(ticket.first_token, ticket.end_token, SMALL.block_size)
    assert len(ids) == len(generations) == len(ticket.block_ids)
    assert ids.max() < 32
    assert ticket.end_layer <= SMALL.num_layers


# ---- servers and clients -----------------------------------------------------------------------


class Loop:
    """An event loop for many examples, and what went wrong in its tasks."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.failures: list[object] = []
        loop = self.runner.get_loop()
        loop.set_exception_handler(lambda _, context: self.failures.append(context))

    def assert_no_failures(self) -> None:
        gc.collect()  # a task's exception that nobody looked at is told when the task goes
        assert self.failures == []


def fuzz_exporter(kind: str, whole: Callable[[Pair], bytes], fuzzed: Fuzzed) -> None:
    """Say what `fuzzed` makes of a whole conversation to an exporter, then pull from it."""
    loop = Loop()
    with loop.runner as runner:
        context = open_pair(kind)
        pair = runner.run(context.__aenter__())
        number = 0

        async def say(said: bytes) -> None:
            nonlocal number
            number += 1
            await converse(pair, said)
            if number % 10 == 0:
                await pair.pull(pair.exporter.issue("r", 0, 4, [5]), [7])

        @SERVED
        @given(fuzzed(whole(pair)))
        def fuzz(said: bytes) -> None:
            runner.run(say(said))

        fuzz()
        generations = pair.source.generations.copy()
        assert not generations.any()
        runner.run(context.__aexit__(None, None, None))
        runner.run(asyncio.sleep(0))
        loop.assert_no_failures()


Fuzzed = Callable[[bytes], st.SearchStrategy[bytes]]


async def converse(pair: Pair, said: bytes) -> None:
    """Say it, and wait for the other end to hang up."""
    (offer,) = pair.exporter.offers
    if offer.name == "shm":
        reader, writer = await asyncio.open_unix_connection(f"\0{offer.endpoint}")
    else:
        host, _, port = offer.endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    with suppress(ConnectionError):
        writer.write(said)
        writer.write_eof()
        async with asyncio.timeout(30):
            await reader.read()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def conversation(pair: Pair) -> bytes:
    """The access token and two good requests."""
    ticket = pair.exporter.issue("r", 0, 4, [5])
    body = msgspec.msgpack.encode(PullRequest(ticket, 0, 4, 0, 2, 0, 2))
    return b"pdKV" + pair.exporter.welcome().access + frame(body) + frame(body)


def mutated_after(num_bytes: int) -> Fuzzed:
    """Leaves that many bytes as they are."""
    return lambda whole: mutated(whole[num_bytes:]).map(lambda rest: whole[:num_bytes] + rest)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_an_exporter_without_access(kind: str) -> None:
    fuzz_exporter(kind, conversation, lambda whole: st.binary(max_size=300) | mutated(whole))


def test_an_exporter_with_access() -> None:
    fuzz_exporter("tcp", conversation, mutated_after(36))


def test_an_exporter_with_a_good_ticket_and_any_box() -> None:
    """The ticket is good; the box is anything that has six numbers, or not even that."""
    numbers = st.integers(-5, 9) | st.integers(-(1 << 63), (1 << 64) - 1)

    def with_box(whole: bytes) -> st.SearchStrategy[bytes]:
        length = struct.unpack("!I", whole[40:44])[0]
        ticket = msgspec.msgpack.decode(whole[44 : 44 + length], type=PullRequest).ticket
        boxes = st.lists(numbers, min_size=6, max_size=6) | st.lists(content, max_size=8)
        return boxes.map(lambda box: whole[:36] + frame(msgspec.msgpack.encode([ticket, *box])))

    fuzz_exporter("tcp", conversation, with_box)


def test_a_puller_of_an_exporter_that_says_anything() -> None:
    size = 2 * SMALL.block_bytes
    good = frame(msgspec.msgpack.encode(PullVerdict(num_bytes=size)))
    answers = mutated(good + bytes(range(256)) * (size // 256) + frame(b"\x93\x00\xa0\xa0"))
    loop = Loop()
    with loop.runner as runner:
        context = open_pair("fake")
        pair = runner.run(context.__aenter__())
        ticket = pair.exporter.issue("r", 0, 8, [1, 2])

        async def pull(answer: bytes) -> None:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                with suppress(ConnectionError):
                    await reader.readexactly(36)
                    writer.write(answer)
                    await writer.drain()
                    writer.write_eof()
                    await reader.read()
                writer.close()

            async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
                host, port = server.sockets[0].getsockname()
                offer = TransportOffer(name="tcp", endpoint=f"{host}:{port}")
                welcome = replace(pair.exporter.welcome(), offers=[offer])
                link = await pair.puller.connect(welcome, timeout_s=30)
                with suppress(TransferError, StaleIncarnation):
                    await pair.puller.pull(link, ticket, [4, 5], 0, timeout_s=30)
                await link.close()

        @SERVED
        @given(answers | st.binary(max_size=300))
        def fuzz(answer: bytes) -> None:
            runner.run(pull(answer))

        fuzz()
        assert not np.delete(pair.destination.data, [4, 5], axis=0).any()
        runner.run(context.__aexit__(None, None, None))
        loop.assert_no_failures()


def test_a_puller_with_any_ticket() -> None:
    """Of an exporter that seals what it likes: no more than an error, and no other block."""
    loop = Loop()
    with loop.runner as runner:
        context = open_pair("fake")
        pair = runner.run(context.__aenter__())
        fitting = replace(read_ticket(pair.exporter.issue("r", 0, 8, [1, 2])), checksums=b"")

        async def pull(ticket: bytes) -> None:
            with suppress(TransferError, StaleIncarnation):
                await pair.pull(ticket, range(4, 12))

        @SERVED
        @given(random_tickets, st.sets(st.sampled_from(Ticket.__struct_fields__)))
        def fuzz(ticket: Ticket, changed: set[str]) -> None:
            fields = {name: getattr(ticket, name) for name in changed}
            body = msgspec.msgpack.encode(replace(fitting, **fields))
            runner.run(pull(body + bytes(MAC_BYTES)))

        fuzz()
        assert not np.delete(pair.destination.data, range(4, 12), axis=0).any()
        runner.run(context.__aexit__(None, None, None))
        loop.assert_no_failures()
