"""Nonsense on every port that a process listens on: it goes on serving, as the same process."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import chain

import aiohttp
import grpc
import grpc.aio
import psutil
import pytest

from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.kv import KvDtype, KvLayout
from pdserve.protocol import NodeHello, NodeRole, NodeState, PullerHello, Settle, TokenBatch
from pdserve.protocol.version import PROTOCOL
from pdserve.wire.envelopes import FROM_NODE, FROM_PULLER
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import MODEL, Client
from tests.cluster.fleet import Fleet
from tests.matrix import matrix

SERVED_S = 60.0  # a request in the midst of it all
TAKES_S = 2.0  # who reads it, another piece of garbage
_NOISE = random.Random(7)

GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "noise": _NOISE.randbytes(70_000),
    "zeros": bytes(70_000),
    "ones": b"\xff" * 70_000,
    "text": b"hello?\r\n" * 10,
    "a wrong access token": b"pdKV" + bytes(32),
    "half an access token": b"pdKV" + bytes(10),
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "broken HTTP/1.1": b"POST /v1/completions HTTP/9\r\nContent-Length: -5\r\n: \x00\r\n\r\n",
    "HTTP/2 preface, then noise": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _NOISE.randbytes(5000),
    "HTTP/2 preface, then silence": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + _NOISE.randbytes(200),
    "a frame of 4 GiB": (2**32 - 1).to_bytes(4, "little") + b"x" * 100,
    "a frame that does not come": (1000).to_bytes(4, "little") + b"x" * 10,
}


def listening(pid: int) -> list[tuple[str, int] | str]:
    """Every address on which a process accepts connections: TCP, and abstract unix sockets."""
    process = psutil.Process(pid)
    tcp = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    unix = [c.laddr for c in process.net_connections("unix") if c.laddr]
    return [*dict.fromkeys((a.ip, a.port) for a in tcp), *dict.fromkeys(unix)]


def connect(address: tuple[str, int] | str) -> socket.socket:
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(SERVED_S)
        sock.connect("\0" + address.removeprefix("@"))
    else:
        sock = socket.create_connection(address, SERVED_S)
    sock.settimeout(TAKES_S)
    return sock


def say(sock: socket.socket, garbage: bytes) -> None:
    """As much of it as the other end takes."""
    with suppress(OSError):  # it hung up, as it may
        sock.sendall(garbage)


async def assert_unharmed(fleet: Fleet, client: Client, pids: dict[str, int]) -> None:
    async with asyncio.timeout(SERVED_S):
        outputs = await asyncio.gather(*(client.complete(make_prompt(60, i), 8) for i in range(4)))
    assert {output.decode_node for output in outputs} <= {"decode-0", "decode-1"}
    assert all(len(output.tokens) == 8 for output in outputs)
    assert {name: fleet.pid(name) for name in pids} == pids
    assert all(fleet.is_running(name) for name in pids)


@pytest.fixture
def pids(fleet: Fleet) -> dict[str, int]:
    return {name: fleet.pid(name) for name in (COORDINATOR, *fleet.node_names)}


async def test_garbage_on_every_port(fleet: Fleet, client: Client, pids: dict[str, int]) -> None:
    addresses = {name: listening(pid) for name, pid in pids.items()}
    assert len(addresses[COORDINATOR]) == 2, addresses  # HTTP, gRPC
    assert len(addresses["prefill-0"]) == 4, addresses  # gRPC, metrics, TCP transport, shm
    for garbage in GARBAGE.values():
        with ExitStack() as stack:
            for address in chain.from_iterable(addresses.values()):
                sock = stack.enter_context(connect(address))
                await asyncio.to_thread(say, sock, garbage)
            # Here every one of them is still connected, and says no more.
            await assert_unharmed(fleet, client, pids)
    await assert_unharmed(fleet, client, pids)


async def test_many_silent_connections(fleet: Fleet, client: Client, pids: dict[str, int]) -> None:
    with ExitStack() as stack:
        addresses = [a for pid in pids.values() for a in listening(pid)]
        connecting = [asyncio.to_thread(connect, a) for a in addresses for _ in range(50)]
        for sock in await asyncio.gather(*connecting):
            stack.enter_context(sock)
        await assert_unharmed(fleet, client, pids)


# ---- well-formed nonsense ----------------------------------------------------------------------

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype=KvDtype("float32"))


def node_hello(**changes: object) -> NodeHello:
    fields = {
        "node_id": "stranger",
        "incarnation": "1",
        "role": NodeRole.DECODE,
        "state": NodeState.READY,
        "session_address": "127.0.0.1:1",
        "metrics_address": "127.0.0.1:1",
        "model_id": "another model",
        "revision": "",
        "layout": LAYOUT,
        "num_blocks": 10,
        "max_model_len": 10,
        "introduction_key": bytes(32),
        "protocol": PROTOCOL,
    }
    return NodeHello(**(fields | changes))


def puller_hello(**changes: object) -> PullerHello:
    fields = {
        "node_id": "stranger",
        "incarnation": "1",
        "exporter_incarnation": "1",
        "fingerprint": "x",
        "layout": LAYOUT,
        "protocol": PROTOCOL,
    }
    return PullerHello(**(fields | changes))


async def call(address: str, method: str, *messages: bytes) -> grpc.StatusCode:
    """Open that stream, send these messages; the status with which it is closed."""
    async with grpc.aio.insecure_channel(address) as channel:
        stream = channel.stream_stream(method)()  # no serialisers: bytes as they are
        try:
            async with asyncio.timeout(SERVED_S):
                for message in messages:
                    await stream.write(message)
                while await stream.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError:
            pass
        return await stream.code()


ATTACH = "/pdserve.wire.Coordinator/Attach"
OPEN = "/pdserve.wire.KvSession/Open"


@pytest.mark.parametrize(
    "first",
    matrix(
        [
            lambda: FROM_NODE.wrap(node_hello(node_id="prefill-0")).SerializeToString(),
            lambda: b"\xff\xff\xff\xff",
            lambda: b"",
            lambda: FROM_NODE.wrap(TokenBatch(events=[])).SerializeToString(),
            lambda: FROM_NODE.wrap(node_hello()).SerializeToString(),
            lambda: FROM_NODE.wrap(node_hello(introduction_key=bytes(99))).SerializeToString(),
        ],
        2,
    ),
    ids=["somebody's name", "no protobuf", "empty", "not a hello", "another model", "no key"],
)
async def test_strangers_at_the_coordinator(
    fleet: Fleet, client: Client, pids: dict[str, int], first: Callable[[], bytes]
) -> None:
    code = await call(fleet.grpc_address, ATTACH, first())
    assert code is not grpc.StatusCode.OK
    assert {node.node_id for node in (await fleet.status()).nodes} == set(fleet.node_names)
    await assert_unharmed(fleet, client, pids)


@pytest.mark.parametrize(
    "first",
    matrix(
        [
            lambda life: FROM_PULLER.wrap(
                puller_hello(exporter_incarnation=life, introduction=bytes(32))
            ).SerializeToString(),
            lambda life: b"\xff\xff\xff\xff",
            lambda life: b"",
            lambda life: FROM_PULLER.wrap(
                Settle(subscription_id="x", pulled=True)
            ).SerializeToString(),
            lambda life: FROM_PULLER.wrap(puller_hello()).SerializeToString(),
        ],
        2,
    ),
    ids=["introduced by nobody", "no protobuf", "empty", "not a hello", "another life"],
)
async def test_strangers_at_a_node(
    fleet: Fleet, client: Client, pids: dict[str, int], first: Callable[[str], bytes]
) -> None:
    node = (await fleet.status()).node("prefill-0")
    assert node is not None
    assert await call(node.session_address, OPEN, first(node.incarnation)) is not grpc.StatusCode.OK
    await assert_unharmed(fleet, client, pids)


BODIES: dict[str, bytes] = {
    "not JSON": b"{'a': 1}",
    "not an object": b"[1, 2]",
    "no prompt": b'{"model": "tiny"}',
    "nested": b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "a lone surrogate": b'{"model": "tiny", "prompt": "\\ud800"}',
    "ids out of range": b'{"model": "tiny", "prompt": [257]}',
    "negative ids": b'{"model": "tiny", "prompt": [-1]}',
    "huge ids": b'{"model": "tiny", "prompt": [99999999999999999999999]}',
    "booleans for ids": b'{"model": "tiny", "prompt": [true]}',
    "an empty prompt": b'{"model": "tiny", "prompt": []}',
    "no tokens": b'{"model": "tiny", "prompt": "a", "max_tokens": 0}',
    "infinite": b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
    "unknown": b'{"model": "tiny", "prompt": "a", "tempreature": 1}',
}


async def test_bodies_that_make_no_sense(
    fleet: Fleet, client: Client, pids: dict[str, int]
) -> None:
    assert MODEL == "tiny"
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for name, body in BODIES.items():
            async with session.post(f"{fleet.url}/v1/completions", data=body) as response:
                answer = await response.json()
                assert response.status == 400, (name, answer)
                assert set(answer["error"]) == {"message", "type", "param", "code"}, name
    await assert_unharmed(fleet, client, pids)
