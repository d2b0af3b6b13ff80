"""Sessions between two nodes, over real gRPC and a real transport on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress

import grpc.aio
import pytest
from msgspec.structs import replace

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from pdserve.commands.bench.chaos.relay import Relay
from pdserve.node.sessions.client import Sessions
from pdserve.node.sessions.server import SessionServer, Subscriber
from pdserve.node.sessions.session import Notice, Session
from pdserve.protocol import (
    Announcement,
    ExporterWelcome,
    HandoffEnded,
    HandoffRecord,
    NodeAddress,
    Pong,
    Subscribe,
)
from pdserve.settings.timeouts import Timeouts
from pdserve.shared.clock import ManualClock, SystemClock
from pdserve.shared.errors import (
    AccessDenied,
    LayoutMismatch,
    PeerLost,
    RequestCancelled,
    StaleIncarnation,
)
from pdserve.shared.introduction import introduce, new_key
from pdserve.shared.simulated_link import SimulatedLink
from pdserve.wire import session_pb2_grpc
from pdserve.wire.channel import Server, open_channel
from pdserve.wire.envelopes import FROM_EXPORTER, FROM_PULLER
from pdserve.wire.session_pb2_grpc import KvSessionStub
from tests.fakes.hellos import LAYOUT

TIMEOUTS = Timeouts(connect_s=30.0, liveness_s=2.0)
HASTY = replace(TIMEOUTS, liveness_s=0.6, heartbeat_s=0.03)
IDENTITY = KvIdentity("m", "r", LAYOUT)


class ScriptedAnnouncer:
    """Remembers who listens; the test speaks."""

    def __init__(self) -> None:
        self.subscribers: dict[str, Subscriber] = {}
        self.streams: list[tuple[str, int, str]] = []
        self.settled: list[tuple[str, bool]] = []
        self.changed = asyncio.Event()
        self.fault: Exception | None = None  # which `renew` raises

    def subscribe(self, request_id: str, subscriber: Subscriber, *, at_end: bool = False) -> None:
        self.subscribers[request_id] = subscriber
        self.changed.set()

    def subscribe_to_stream(
        self, request_id: str, subscriber: Subscriber, num_emitted: int, taker: str
    ) -> None:
        self.streams.append((request_id, num_emitted, taker))
        self.subscribe(request_id, subscriber)

    def take_over(self, request_id: str, subscriber: Subscriber) -> None:
        subscriber(HandoffRecord(request_id=request_id, num_tokens=9, token_ids=[1, 2]))

    def unsubscribe(self, request_id: str, subscriber: Subscriber) -> None:
        self.subscribers.pop(request_id, None)
        self.changed.set()

    def renew(self, request_id: str, subscriber: Subscriber) -> None:
        if self.fault is not None:
            raise self.fault
        subscriber(Announcement(request_id=request_id, ticket=b"new", is_restart=True))

    def settle(self, request_id: str, subscriber: Subscriber, *, was_pulled: bool) -> None:
        self.subscribers.pop(request_id, None)
        self.settled.append((request_id, was_pulled))
        self.changed.set()

    async def until_changed(self) -> None:
        async with asyncio.timeout(30):
            await self.changed.wait()
        self.changed.clear()


class Pair:
    """An exporting node and a pulling node in one process."""

    def __init__(
        self,
        puller_identity: KvIdentity = IDENTITY,
        exporter_identity: KvIdentity = IDENTITY,
        simulated: SimulatedLink | None = None,
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        self.memory = ExportedPool(8, exporter_identity.layout.block_bytes)
        self.exporter = Exporter("p", "life-1", exporter_identity, self.memory, SystemClock())
        self.announcer = ScriptedAnnouncer()
        self.server = Server(TIMEOUTS.liveness_s)
        servicer = SessionServer(self.exporter, self.announcer, SystemClock(), timeouts.connect_s)
        session_pb2_grpc.add_KvSessionServicer_to_server(servicer, self.server.grpc)
        self.destination = ExportedPool(8, puller_identity.layout.block_bytes)
        self.puller = Puller(
            self.destination, puller_identity, host_id(), simulated=lambda exporter: simulated
        )
        self.sessions = Sessions(
            "d", "life-9", puller_identity, self.puller, SystemClock(), timeouts
        )
        self.peer = NodeAddress(
            node_id="p",
            incarnation="life-1",
            session_address="",
            introduction=introduce(self.exporter.introduction_key, "life-1", "life-9"),
        )

    async def start(self) -> None:
        await self.exporter.start("127.0.0.1")
        port = await self.server.start("127.0.0.1", 0)
        self.peer = replace(self.peer, session_address=f"127.0.0.1:{port}")

    async def close(self) -> None:
        await self.sessions.close()
        await self.server.stop(0)
        await self.exporter.close()
        await self.puller.close()
        self.memory.close()
        self.destination.close()


async def first_notice(session: Session, request_id: str) -> Notice:
    async with session.subscribed(request_id) as subscription:
        return await subscription.next()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.start()
    yield pair
    await pair.close()


async def test_notices_come_in_order_and_a_settle_goes_back(pair: Pair) -> None:
    session = await pair.sessions.get(pair.peer)
    assert await pair.sessions.get(pair.peer) is session
    async with session.subscribed("r") as subscription:
        waiting = asyncio.ensure_future(subscription.next())
        await pair.announcer.until_changed()
        say = pair.announcer.subscribers["r"]
        said_s = SystemClock().now()
        say(Announcement(request_id="r", ticket=b"one"))
        say(HandoffRecord(request_id="r", num_tokens=3, token_ids=[1]))
        async with asyncio.timeout(30):
            first = await waiting
            second = await subscription.next()
        subscription.was_pulled = True
    assert isinstance(first.message, Announcement)
    assert first.message.ticket == b"one"
    assert isinstance(second.message, HandoffRecord)
    assert second.received_s >= first.received_s
    assert said_s <= second.message.written_s <= second.received_s
    await pair.announcer.until_changed()
    assert pair.announcer.settled == [("r", True)]


async def test_a_stream_is_subscribed_to_and_taken_over(pair: Pair) -> None:
    session = await pair.sessions.get(pair.peer)
    async with session.subscribed("s", num_emitted=7, taker="s~1") as subscription:
        await pair.announcer.until_changed()
        assert pair.announcer.streams == [("s", 7, "s~1")]
        pair.announcer.subscribers["s"](Announcement(request_id="s", ticket=b""))
        async with asyncio.timeout(30):
            all_so_far = await subscription.next()
            subscription.take_over()
            record = await subscription.next()
    assert isinstance(all_so_far.message, Announcement)
    assert not all_so_far.message.ticket
    assert isinstance(record.message, HandoffRecord)
    assert record.message.token_ids == [1, 2]
    await pair.announcer.until_changed()
    assert pair.announcer.settled == [("s", False)]


async def test_only_a_lost_host_of_the_node_makes_it_unavailable(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(_: object) -> None:
        raise PeerLost("host A: it is gone")

    with monkeypatch.context() as patch:
        patch.setattr(pair.exporter, "introduce", lost)
        with pytest.raises(PeerLost, match="UNAVAILABLE host A: it is gone"):
            await pair.sessions.get(pair.peer)
    session = await pair.sessions.get(pair.peer)
    pair.announcer.fault = PeerLost("of something else")
    # gRPC knows no status where a ping was on its way: findings/grpcio-status-lost-in-a-write.sh.
    async with session.subscribed("r") as subscription, asyncio.timeout(30):
        with pytest.raises(PeerLost, match=r"UNKNOWN|INTERNAL Internal error from Core"):
            await subscription.renew()


async def test_over_a_simulated_link_everything_takes_its_time() -> None:
    """A subscription and its answer: a round trip. A pull: another one, and its bytes."""
    slow = SimulatedLink(bandwidth=20 * IDENTITY.layout.block_bytes, delay=0.02)
    pair = Pair(simulated=slow)
    await pair.start()
    session = await pair.sessions.get(pair.peer)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    ticket = pair.exporter.issue("r", 0, IDENTITY.layout.block_size, [3])
    async with session.subscribed("r") as subscription, asyncio.timeout(30):
        await pair.announcer.until_changed()
        assert loop.time() >= began_s + slow.delay
        pair.announcer.subscribers["r"](Announcement(request_id="r", ticket=ticket))
        await subscription.next()
        asked_s = loop.time()
        assert asked_s >= began_s + 2 * slow.delay
        await pair.puller.pull(session.link, ticket, [5], 0, 3.0)
        assert loop.time() >= asked_s + 2 * slow.delay + 1 / 20
    await pair.close()


async def test_a_renewal_begins_where_everything_is_said_again(pair: Pair) -> None:
    session = await pair.sessions.get(pair.peer)
    async with session.subscribed("r") as subscription:
        await pair.announcer.until_changed()
        say = pair.announcer.subscribers["r"]
        say(Announcement(request_id="r", ticket=b"one"))
        say(Announcement(request_id="r", ticket=b"two"))
        async with asyncio.timeout(30):
            await subscription.next()
            renewed = await subscription.renew()
    assert renewed.message.ticket == b"new"


async def test_attempts_at_one_request_are_not_taken_for_each_other(pair: Pair) -> None:
    """What was said to the first one is still on its way when the second one subscribes."""
    session = await pair.sessions.get(pair.peer)
    async with session.subscribed("r"):
        await pair.announcer.until_changed()
        say = pair.announcer.subscribers["r"]
        say(Announcement(request_id="r", ticket=b"for the first"))
    async with session.subscribed("r") as second:
        while pair.announcer.subscribers.get("r") in (None, say):
            await pair.announcer.until_changed()
        assert pair.announcer.settled == [("r", False)]
        pair.announcer.subscribers["r"](Announcement(request_id="r", ticket=b"for the second"))
        notice = await asyncio.wait_for(second.next(), 30)
    assert notice.message.ticket == b"for the second"


async def test_an_ended_handoff_raises_what_the_exporter_said(pair: Pair) -> None:
    session = await pair.sessions.get(pair.peer)
    waiting = asyncio.ensure_future(first_notice(session, "r"))
    await pair.announcer.until_changed()
    pair.announcer.subscribers["r"](
        HandoffEnded(request_id="r", code=RequestCancelled.code, message="the client left")
    )
    with pytest.raises(RequestCancelled, match="the client left"):
        await asyncio.wait_for(waiting, 30)


async def test_a_lost_exporter_is_told_to_everybody_who_waits(pair: Pair) -> None:
    session = await pair.sessions.get(pair.peer)

    async def wait_for_room() -> None:
        async with session.subscribed("b") as subscription:
            await subscription.wait(asyncio.Event())

    waiting = [
        asyncio.ensure_future(first_notice(session, "a")),
        asyncio.ensure_future(wait_for_room()),
    ]
    await pair.announcer.until_changed()
    await pair.server.stop(0)
    for task in waiting:
        with pytest.raises(PeerLost):
            await asyncio.wait_for(task, 30)
    with pytest.raises(PeerLost):
        await first_notice(session, "c")
    with pytest.raises(PeerLost):
        await pair.sessions.get(pair.peer)  # a new attempt, which fails as well


async def test_a_puller_that_hangs_up_is_unsubscribed(pair: Pair) -> None:
    session = await pair.sessions.get(pair.peer)
    waiting = asyncio.ensure_future(first_notice(session, "r"))
    await pair.announcer.until_changed()
    await pair.sessions.close()
    with pytest.raises(PeerLost):
        await asyncio.wait_for(waiting, 30)
    await pair.announcer.until_changed()
    assert pair.announcer.subscribers == {}


async def test_a_former_life_of_the_exporter_is_refused(pair: Pair) -> None:
    key = pair.exporter.introduction_key
    stale = replace(
        pair.peer, incarnation="life-0", introduction=introduce(key, "life-0", "life-9")
    )
    with pytest.raises(StaleIncarnation, match="life-0"):
        await pair.sessions.get(stale)


def introduced(pair: Pair, exporter: str = "life-1", puller: str = "life-9") -> bytes:
    """By a coordinator, but perhaps for other lives."""
    return introduce(pair.exporter.introduction_key, exporter, puller)


STRANGERS: dict[str, Callable[[Pair], bytes]] = {
    "nobody's": lambda pair: b"",
    "garbage": lambda pair: b"x" * 1000,
    "another puller's": lambda pair: introduced(pair, puller="life-8"),
    "to another life": lambda pair: introduced(pair, exporter="life-0"),
    "to another exporter": lambda pair: introduce(new_key(), "life-1", "life-9"),
}


@pytest.mark.parametrize("introduction", STRANGERS.values(), ids=STRANGERS.keys())
async def test_a_puller_that_no_coordinator_sent_is_refused(
    pair: Pair, introduction: Callable[[Pair], bytes]
) -> None:
    with pytest.raises(AccessDenied, match="no coordinator of 'p' sent 'd'"):
        await pair.sessions.get(replace(pair.peer, introduction=introduction(pair)))
    assert pair.exporter.statistics.refused == 1
    await pair.sessions.get(pair.peer)  # and with the right one


async def test_access_ends_with_the_session(pair: Pair) -> None:
    session = await pair.sessions.get(pair.peer)
    access = session.link.welcome.access
    pair.exporter.check_access(access)
    await pair.sessions.close()

    def is_revoked() -> bool:
        try:
            pair.exporter.check_access(access)
        except AccessDenied:
            return True
        return False

    async with asyncio.timeout(30):
        while not is_revoked():
            await asyncio.sleep(0.005)


async def test_every_session_has_an_access_of_its_own(pair: Pair) -> None:
    hello = FROM_PULLER.wrap(pair.sessions._hello(pair.peer))
    async with open_channel(pair.peer.session_address, 60) as channel:
        streams = [KvSessionStub(channel).Open() for _ in range(2)]
        for stream in streams:
            await stream.write(hello)
        first, second = [FROM_EXPORTER.unwrap(await stream.read()) for stream in streams]
        for stream in streams:
            stream.cancel()
    assert isinstance(first, ExporterWelcome)
    assert isinstance(second, ExporterWelcome)
    assert first.access != second.access


@pytest.mark.parametrize(
    ("identity", "mentioned"),
    [
        (KvIdentity("another", "r", LAYOUT), "another"),
        (KvIdentity("m", "another", LAYOUT), "another"),
        (KvIdentity("m", "r", replace(LAYOUT, num_layers=2)), "2 x 2 layers"),
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


async def test_a_shard_that_lacks_some_of_our_heads_is_refused() -> None:
    """All of a request's KV comes from one exporter: the other heads would stay undefined."""
    whole = replace(LAYOUT, num_kv_heads=2)
    pair = Pair(KvIdentity("m", "r", whole), KvIdentity("m", "r", whole.shard(0, 2)))
    await pair.start()
    with pytest.raises(LayoutMismatch, match="KV head 1"):
        await pair.sessions.get(pair.peer)
    await pair.close()


async def test_nobody_at_the_address_is_a_lost_peer(pair: Pair) -> None:
    await pair.server.stop(0)
    with pytest.raises(PeerLost):
        async with asyncio.timeout(TIMEOUTS.connect_s):
            await pair.sessions.get(pair.peer)


async def test_a_failure_to_open_a_session_is_remembered_for_a_while(pair: Pair) -> None:
    clock = ManualClock(100.0)
    pair.sessions = Sessions("d", "life-9", IDENTITY, pair.puller, clock, TIMEOUTS)
    stale = replace(pair.peer, incarnation="life-0", introduction=introduced(pair, "life-0"))
    for peer in (stale, pair.peer):
        assert not pair.sessions.has_failed(peer)
    with pytest.raises(StaleIncarnation):
        await pair.sessions.get(stale)
    await pair.sessions.get(pair.peer)
    assert pair.sessions.has_failed(stale)
    assert not pair.sessions.has_failed(pair.peer)
    clock.advance(TIMEOUTS.liveness_s)
    assert not pair.sessions.has_failed(stale)
    trying = asyncio.ensure_future(pair.sessions.get(stale))
    await asyncio.sleep(0)
    assert pair.sessions.has_failed(stale), "others wait for the outcome of one, not with it"
    with pytest.raises(StaleIncarnation):
        await trying


async def test_a_session_that_is_being_opened_is_no_link_yet(pair: Pair) -> None:
    opening = asyncio.ensure_future(pair.sessions.get(pair.peer))
    await asyncio.sleep(0)
    assert pair.sessions.opened(pair.peer) is None
    assert pair.sessions.links() == []
    session = await opening
    assert pair.sessions.opened(pair.peer) is session
    assert [link.peer for link in pair.sessions.links()] == ["p"]


async def test_a_session_that_is_closed_before_it_begins_to_open_is_lost(pair: Pair) -> None:
    opening = asyncio.ensure_future(pair.sessions.get(pair.peer))
    await asyncio.sleep(0)  # its task is there, and begins with the next turn of the loop
    await pair.sessions.close()
    with pytest.raises(PeerLost, match="closed"):
        async with asyncio.timeout(30):
            await opening


async def test_an_exporter_that_never_answers_is_given_up(pair: Pair) -> None:
    """Later than `liveness_s`: its kernel has answered, so it may only be slow."""
    timeouts = Timeouts(connect_s=1.6, liveness_s=1.2)
    sessions = Sessions("d", "life-9", IDENTITY, pair.puller, SystemClock(), timeouts)
    told = r"x did not answer for 1\.6 s, though its host did"
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(PeerLost, match=told):
        async with asyncio.timeout(30):
            await sessions.get(nobody_at(mute.getsockname()[1]))


async def test_a_host_that_never_answers_is_given_up_sooner(pair: Pair) -> None:
    """Nothing is refused: as if what is sent did not arrive."""
    timeouts = Timeouts(connect_s=60.0, liveness_s=0.6)
    sessions = Sessions("d", "life-9", IDENTITY, pair.puller, SystemClock(), timeouts)
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("0.0.0.0", 0), backlog=0))
        port = full.getsockname()[1]
        for _ in range(2):  # from the second one on its kernel does not answer
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            with suppress(BlockingIOError):
                caller.connect(("127.0.0.2", port))
        with pytest.raises(PeerLost, match=r"x did not answer for 0\.6 s$"):
            async with asyncio.timeout(30):
                await sessions.get(nobody_at(port))


def nobody_at(port: int) -> NodeAddress:
    return NodeAddress(node_id="x", incarnation="1", session_address=f"127.0.0.1:{port}")


async def test_a_puller_that_says_no_hello_is_cut() -> None:
    pair = Pair(timeouts=replace(TIMEOUTS, connect_s=0.1))
    await pair.start()
    async with open_channel(pair.peer.session_address, 60) as channel:
        stream = KvSessionStub(channel).Open()
        await stream.wait_for_connection()
        with pytest.raises(grpc.aio.AioRpcError, match="no hello in time"):
            async with asyncio.timeout(30):
                await stream.read()
    await pair.close()


async def test_another_message_instead_of_a_hello_is_refused(pair: Pair) -> None:
    async with open_channel(pair.peer.session_address, 60) as channel:
        stream = KvSessionStub(channel).Open()
        await stream.write(FROM_PULLER.wrap(Subscribe(request_id="r", subscription_id="1")))
        with pytest.raises(grpc.aio.AioRpcError, match="PullerHello first, not Subscribe"):
            await stream.read()


@pytest.fixture
async def hasty_pair() -> AsyncIterator[Pair]:
    pair = Pair(timeouts=HASTY)
    await pair.start()
    yield pair
    await pair.close()


async def test_an_exporter_that_falls_silent_is_lost_to_all_who_wait(hasty_pair: Pair) -> None:
    """Nothing breaks: packets of one host do not arrive at the other any more."""
    address, sessions = hasty_pair.peer.session_address, hasty_pair.sessions
    async with Relay(lambda: address) as relay, asyncio.timeout(30):
        session = await sessions.get(replace(hasty_pair.peer, session_address=relay.address))
        told: list[bool] = []
        sessions.on_silent = lambda: told.append(sessions.links() == [])
        relay.swallow(True)
        with pytest.raises(PeerLost, match=r"p did not answer for \d+\.\d s"):
            await first_notice(session, "r")
        assert sessions.opened(hasty_pair.peer) is None
        assert sessions.has_failed(hasty_pair.peer), "no prefix is asked for there now"
        assert told == [True], "at once, so that others are sent elsewhere"


async def test_an_exporter_with_nothing_to_tell_is_not_lost(
    hasty_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_pongs, is_patient = 0, asyncio.Event()

    def pong() -> Pong:
        nonlocal num_pongs
        num_pongs += 1
        if num_pongs > 2 * HASTY.liveness_s / HASTY.heartbeat_s:
            is_patient.set()
        return Pong()

    monkeypatch.setattr("pdserve.node.sessions.server.Pong", pong)
    session = await hasty_pair.sessions.get(hasty_pair.peer)
    async with asyncio.timeout(30):
        await is_patient.wait()
    assert hasty_pair.sessions.opened(hasty_pair.peer) is session


async def test_an_exporter_of_an_older_build_is_not_asked(
    hasty_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would not know the question, and its silence says nothing."""
    monkeypatch.setattr(Sessions, "_ping", None)
    monkeypatch.setattr(
        "pdserve.node.sessions.server.replace",
        lambda message, **fields: (
            replace(message, **{**fields, "answers_pings": False})
            if isinstance(message, ExporterWelcome)
            else replace(message, **fields)
        ),
    )
    session = await hasty_pair.sessions.get(hasty_pair.peer)
    async with session.subscribed("r") as subscription, asyncio.timeout(30):
        await hasty_pair.announcer.until_changed()
        hasty_pair.announcer.subscribers["r"](Announcement(request_id="r", ticket=b"1"))
        assert (await subscription.next()).message.ticket == b"1"
