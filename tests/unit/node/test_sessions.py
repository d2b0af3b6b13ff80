"""Sessions between two nodes, over real gRPC and a real transport on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio
import pytest

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from pdserve.clock import SystemClock
from pdserve.config import Timeouts
from pdserve.errors import (
    LayoutMismatch,
    PdserveError,
    PeerLost,
    RequestCancelled,
    StaleIncarnation,
)
from pdserve.kv_layout import KvDtype, KvLayout
from pdserve.node.session_client import Sessions
from pdserve.node.session_server import SessionServer, Subscriber
from pdserve.protocol import Announcement, HandoffEnded, HandoffRecord, NodeAddress, Subscribe
from pdserve.wire import session_pb2_grpc
from pdserve.wire.channel import Server, open_channel
from pdserve.wire.envelopes import FROM_PULLER
from pdserve.wire.session_pb2_grpc import KvSessionStub

TIMEOUTS = Timeouts(connect_s=0.4, liveness_s=2.0)
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype=KvDtype.FLOAT32)
IDENTITY = KvIdentity("m", "r", LAYOUT)


class ScriptedAnnouncer:
    """Remembers who listens; the test speaks."""

    def __init__(self) -> None:
        self.subscribers: dict[str, Subscriber] = {}
        self.settled: list[tuple[str, bool]] = []
        self.changed = asyncio.Event()

    def subscribe(self, request_id: str, subscriber: Subscriber) -> None:
        self.subscribers[request_id] = subscriber
        self.changed.set()

    def unsubscribe(self, request_id: str, subscriber: Subscriber) -> None:
        self.subscribers.pop(request_id, None)
        self.changed.set()

    def settle(self, request_id: str, *, was_pulled: bool) -> None:
        self.settled.append((request_id, was_pulled))
        self.changed.set()

    async def until_changed(self) -> None:
        async with asyncio.timeout(3):
            await self.changed.wait()
        self.changed.clear()


class Pair:
    """An exporting node and a pulling node in one process."""

    def __init__(self, puller_identity: KvIdentity = IDENTITY) -> None:
        self.memory = ExportedPool(8, LAYOUT.block_bytes)
        self.exporter = Exporter("p", "life-1", IDENTITY, self.memory, SystemClock())
        self.announcer = ScriptedAnnouncer()
        self.server = Server(TIMEOUTS.liveness_s)
        servicer = SessionServer(self.exporter, self.announcer, TIMEOUTS.connect_s)
        session_pb2_grpc.add_KvSessionServicer_to_server(servicer, self.server.grpc)
        self.destination = ExportedPool(8, puller_identity.layout.block_bytes)
        self.puller = Puller(self.destination, puller_identity, host_id())
        self.sessions = Sessions(
            "d", "life-9", puller_identity, self.puller, SystemClock(), TIMEOUTS
        )
        self.peer = NodeAddress(node_id="p", incarnation="life-1", session_address="")

    async def start(self) -> None:
        await self.exporter.start("127.0.0.1")
        port = await self.server.start("127.0.0.1", 0)
        self.peer = NodeAddress(
            node_id="p", incarnation="life-1", session_address=f"127.0.0.1:{port}"
        )

    async def close(self) -> None:
        await self.sessions.close()
        await self.server.stop(0)
        await self.exporter.close()
        self.puller.close()
        self.memory.close()
        self.destination.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.start()
    yield pair
    await pair.close()


async def test_notices_come_in_order_and_a_settle_goes_back(pair: Pair) -> None:
    session = await pair.sessions.get(pair.peer)
    assert await pair.sessions.get(pair.peer) is session
    async with aclosing(session.notices("r")) as notices:
        waiting = asyncio.ensure_future(anext(notices))
        await pair.announcer.until_changed()
        say = pair.announcer.subscribers["r"]
        say(Announcement(request_id="other", ticket=b"not ours"))
        say(Announcement(request_id="r", ticket=b"one"))
        say(HandoffRecord(request_id="r", num_tokens=3, token_ids=[1]))
        async with asyncio.timeout(3):
            first = await waiting
            second = await anext(notices)
    assert isinstance(first.message, Announcement)
    assert first.message.ticket == b"one"
    assert isinstance(second.message, HandoffRecord)
    assert second.received_s >= first.received_s
    session.settle("r", was_pulled=True)
    await pair.announcer.until_changed()
    assert pair.announcer.settled == [("r", True)]


async def test_an_ended_handoff_raises_what_the_exporter_said(pair: Pair) -> None:
    session = await pair.sessions.get(pair.peer)
    waiting = asyncio.ensure_future(anext(session.notices("r")))
    await pair.announcer.until_changed()
    pair.announcer.subscribers["r"](
        HandoffEnded(request_id="r", code=RequestCancelled.code, message="the client left")
    )
    with pytest.raises(RequestCancelled, match="the client left"):
        await asyncio.wait_for(waiting, 3)


async def test_a_lost_exporter_is_told_to_everybody_who_waits(pair: Pair) -> None:
    session = await pair.sessions.get(pair.peer)
    waiting = [asyncio.ensure_future(anext(session.notices(name))) for name in "ab"]
    await pair.announcer.until_changed()
    room = asyncio.ensure_future(session.wait("a", asyncio.Event()))
    await pair.server.stop(0)
    for task in [*waiting, room]:
        with pytest.raises(PeerLost):
            await asyncio.wait_for(task, 3)
    with pytest.raises(PeerLost):
        await anext(session.notices("c"))
    with pytest.raises(PeerLost):
        await pair.sessions.get(pair.peer)  # a new attempt, which fails as well


async def test_a_puller_that_hangs_up_is_unsubscribed(pair: Pair) -> None:
    session = await pair.sessions.get(pair.peer)
    waiting = asyncio.ensure_future(anext(session.notices("r")))
    await pair.announcer.until_changed()
    await pair.sessions.close()
    with pytest.raises(PeerLost):
        await asyncio.wait_for(waiting, 3)
    await pair.announcer.until_changed()
    assert pair.announcer.subscribers == {}


async def test_a_former_life_of_the_exporter_is_refused(pair: Pair) -> None:
    stale = NodeAddress(
        node_id="p", incarnation="life-0", session_address=pair.peer.session_address
    )
    with pytest.raises(StaleIncarnation, match="life-0"):
        await pair.sessions.get(stale)


@pytest.mark.parametrize(
    ("identity", "mentioned"),
    [
        (KvIdentity("another", "r", LAYOUT), "another"),
        (KvIdentity("m", "another", LAYOUT), "another"),
        (
            KvIdentity(
                "m",
                "r",
                KvLayout(
                    num_layers=2,
                    num_kv_heads=1,
                    head_dim=8,
                    block_size=4,
                    dtype=KvDtype.FLOAT32,
                ),
            ),
            "2 x 2 layers",
        ),
    ],
    ids=["model", "revision", "layers"],
)
async def test_kv_of_another_kind_is_refused(identity: KvIdentity, mentioned: str) -> None:
    pair = Pair(identity)
    await pair.start()
    with pytest.raises(LayoutMismatch) as refusal:
        await pair.sessions.get(pair.peer)
    assert "'d'" in str(refusal.value) or mentioned in str(refusal.value)
    await pair.close()


async def test_nobody_at_the_address_is_a_lost_peer(pair: Pair) -> None:
    await pair.server.stop(0)
    with pytest.raises(PeerLost):
        async with asyncio.timeout(TIMEOUTS.connect_s + 2):
            await pair.sessions.get(pair.peer)


async def test_an_exporter_that_never_answers_is_given_up(pair: Pair) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    mute = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = f"127.0.0.1:{mute.sockets[0].getsockname()[1]}"
    with pytest.raises(PdserveError, match="did not answer within"):
        async with asyncio.timeout(TIMEOUTS.connect_s + 2):
            await pair.sessions.get(
                NodeAddress(node_id="x", incarnation="1", session_address=address)
            )
    mute.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()


async def test_a_puller_that_says_no_hello_is_cut(pair: Pair) -> None:
    async with open_channel(pair.peer.session_address, 60) as channel:
        stream = KvSessionStub(channel).Open()
        await stream.wait_for_connection()
        with pytest.raises(grpc.aio.AioRpcError, match="no hello in time"):
            async with asyncio.timeout(TIMEOUTS.connect_s + 2):
                await stream.read()


async def test_another_message_instead_of_a_hello_is_refused(pair: Pair) -> None:
    async with open_channel(pair.peer.session_address, 60) as channel:
        stream = KvSessionStub(channel).Open()
        await stream.write(FROM_PULLER.wrap(Subscribe(request_id="r")))
        with pytest.raises(grpc.aio.AioRpcError, match="Subscribe instead of a hello"):
            await stream.read()
