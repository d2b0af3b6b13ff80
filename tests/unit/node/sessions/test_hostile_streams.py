"""Nonsense on a node's gRPC streams: refused, and the next one is served.

An exception that is not expected would close a stream with the status UNKNOWN.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import msgspec
import pytest
from msgspec.structs import replace

from pdserve.protocol import (
    PrefixQuery,
    PullerHello,
    Renew,
    Settle,
    Subscribe,
)
from pdserve.wire.envelopes import FROM_PULLER
from tests.unit.node.sessions.test_sessions import Pair

NUM_STREAMS = 150
MANNERLY = {  # how a stream ends that does not keep to the protocol, or just ends
    grpc.StatusCode.OK,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,  # our own client, when we write to a stream that has ended
}


async def status_of(address: str, method: str, hello: bytes, said: list[bytes]) -> grpc.StatusCode:
    """Say the hello, if any, and after its answer the rest; how the other end closes the stream."""
    async with grpc.aio.insecure_channel(address) as channel:
        stream = channel.stream_stream(method)()
        try:
            async with asyncio.timeout(30):
                if hello:
                    await stream.write(hello)
                    await stream.read()
                for message in said:
                    await stream.write(message)
                await stream.done_writing()
                while await stream.read() is not grpc.aio.EOF:
                    pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it has ended before we had said everything
        async with asyncio.timeout(30):
            return await stream.code()


def nonsense(noise: random.Random, messages: list[bytes]) -> bytes:
    """One of the messages, as it is or with some bits flipped, or noise."""
    said = bytearray(noise.choice(messages))
    match noise.randrange(4):
        case 0:
            return noise.randbytes(noise.randrange(100))
        case 1 if said:
            for _ in range(noise.randint(1, 4)):
                said[noise.randrange(len(said))] ^= 1 << noise.randrange(8)
        case 2:
            del said[noise.randrange(len(said) + 1) :]
    return bytes(said)


async def assert_mannerly(address: str, method: str, messages: list[bytes], seed: int) -> None:
    """The first of the messages is a good hello, so that half of the streams get past it."""
    noise = random.Random(seed)
    for _ in range(NUM_STREAMS):
        good = messages[0] if noise.random() < 0.5 else b""
        said = [nonsense(noise, messages[1:]) for _ in range(noise.randrange(4))]
        assert await status_of(address, method, good, said) in MANNERLY, said


def encoded(wrap: Callable[[msgspec.Struct], object], *messages: msgspec.Struct) -> list[bytes]:
    return [wrap(message).SerializeToString() for message in messages]  # type: ignore[attr-defined]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.start()
    yield pair
    await pair.close()


async def test_a_node_goes_on_serving_its_sessions(pair: Pair) -> None:
    good = pair.sessions._hello(pair.peer)
    layout = replace(good.layout, block_size=0)
    messages = encoded(
        FROM_PULLER.wrap,
        good,
        Subscribe(request_id="r", subscription_id="s"),
        Settle(subscription_id="s", pulled=True),
        Renew(subscription_id="s"),
        PrefixQuery(query_id="q", first_block=0, hashes=[bytes(32)]),
        replace(good, layout=layout),
        replace(good, introduction=b""),
        replace(good, node_id="x" * 100_000),
        PullerHello(
            node_id="", incarnation="", exporter_incarnation="", fingerprint="", layout=layout
        ),
    )
    address = pair.peer.session_address
    await assert_mannerly(address, "/pdserve.wire.KvSession/Open", messages, seed=7)
    async with asyncio.timeout(30):
        assert (await pair.sessions.get(pair.peer)).link.transport == "shm"
    assert not pair.announcer.subscribers
