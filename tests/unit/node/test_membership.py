"""A node's link and a coordinator's service, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf, nan
from typing import TypeAlias

import grpc
import grpc.aio
import pytest
from msgspec.structs import replace

from coordinator.admission import Admission, WaitingLine
from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Registry
from coordinator.nodes.revisions import Revisions
from coordinator.requests.running import RunningRequest
from coordinator.routing import Router
from coordinator.service import CoordinatorService
from pdserve.kv import KvDtype
from pdserve.node.coordinator_link import CoordinatorLink
from pdserve.node.legs import Legs
from pdserve.protocol import (
    DecodeLeg,
    FinishReason,
    KvEvents,
    KvTier,
    LoadReport,
    NodeHello,
    NodeRole,
    NodeState,
    PerfReport,
    PrefillLeg,
    Prompt,
    SamplingParams,
    SetRole,
    StepCosts,
    TokenBatch,
    TokenEvent,
    TransferCosts,
    Welcome,
)
from pdserve.protocol.version import PROTOCOL
from pdserve.settings.timeouts import Timeouts
from pdserve.shared.errors import MalformedMessage, NodeLost
from pdserve.wire import coordinator_pb2_grpc
from pdserve.wire.channel import Server, open_channel
from pdserve.wire.coordinator_pb2_grpc import CoordinatorStub
from pdserve.wire.envelopes import FROM_COORDINATOR, FROM_NODE
from pdserve.wire.outbox import Outbox
from tests.fakes.hellos import LAYOUT, node_hello
from tests.fakes.members import made_flow, output
from tests.waits import until

TIMEOUTS = Timeouts(heartbeat_s=0.05, liveness_s=0.4, connect_s=0.4)
HASTY = replace(TIMEOUTS, heartbeat_s=0.02, liveness_s=0.1)  # a busy process is lost in 1.5 s
RawContext: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


def hello(node_id: str = "d", **changes: object) -> NodeHello:
    return node_hello(node_id, state=NodeState.LOADING, **changes)


class Coordinator:
    """The gRPC half of a coordinator."""

    def __init__(self, timeouts: Timeouts = TIMEOUTS, incarnation: str = "1") -> None:
        self.registry = Registry()
        router = Router(self.registry, "colocated")
        admission = Admission(WaitingLine[RunningRequest](8))
        self.flow = made_flow(self.registry, router, admission)
        self.server = Server(timeouts.liveness_s)
        self.registered_name = ""
        self.model_id, self.revisions = "m", Revisions(self.registry, router.can_route, {})
        welcome = Welcome(coordinator_id="c", incarnation=incarnation, protocol=PROTOCOL)
        service = CoordinatorService([self], welcome, timeouts)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(service, self.server.grpc)
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self.port = await self.server.start("127.0.0.1", port)

    @property
    def num_members(self) -> int:
        return len(list(self.registry))


@dataclass
class Receiver:
    """Records legs, and answers a decode leg with its tokens."""

    state: NodeState = NodeState.READY
    role: NodeRole = NodeRole.DECODE
    legs: Legs = field(default_factory=Legs)
    started: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_losses: int = 0

    def start_prefill(self, leg: PrefillLeg, link: CoordinatorLink) -> None:
        raise AssertionError("not for this node")

    def start_decode(self, leg: DecodeLeg, link: CoordinatorLink) -> None:
        self.started.append(leg.request_id)
        self.legs.open(leg.request_id, link)

    def cancel_leg(self, request_id: str, reason: str) -> None:
        self.cancelled.append(request_id)
        self.legs.close(request_id)

    def set_role(self, role: NodeRole) -> None:
        self.role = role

    def drain(self, become: str) -> None:
        self.state = NodeState.DRAINING

    def coordinator_lost(self, link: CoordinatorLink) -> None:
        self.num_losses += 1
        for request_id in self.legs.of(link):
            self.cancel_leg(request_id, "lost")

    def finish(self, request_id: str) -> None:
        event = TokenEvent(
            request_id=request_id, index=0, token_ids=[7], finish_reason=FinishReason.STOP
        )
        self.legs.add_event(event)
        self.legs.flush()
        self.legs.close(request_id)


@asynccontextmanager
async def attached(coordinator: Coordinator, receiver: Receiver) -> AsyncIterator[CoordinatorLink]:
    link = CoordinatorLink(
        f"127.0.0.1:{coordinator.port}",
        lambda: replace(hello(), role=receiver.role),
        lambda: LoadReport(state=receiver.state, role=receiver.role),
        receiver,
        TIMEOUTS,
    )
    running = asyncio.create_task(link.run())
    try:
        await until(coordinator.flow.is_ready)
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def raw_coordinator(
    attach: Callable[[object, RawContext], Awaitable[None]],
    leave_s: float = 1.0,
) -> AsyncIterator[CoordinatorLink]:
    """A link to a coordinator of which only `attach` is there, and that in bytes."""
    server = grpc.aio.server()
    handlers = {"Attach": grpc.stream_stream_rpc_method_handler(attach)}
    service = grpc.method_handlers_generic_handler("pdserve.wire.Coordinator", handlers)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield CoordinatorLink(
        f"127.0.0.1:{port}",
        hello,
        lambda: LoadReport(state=NodeState.READY, role=NodeRole.DECODE),
        Receiver(),
        TIMEOUTS,
        leave_s=leave_s,
    )
    await server.stop(0)


@pytest.fixture
def timeouts() -> Timeouts:
    return TIMEOUTS


@pytest.fixture
async def coordinator(timeouts: Timeouts) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(timeouts)
    await coordinator.start()
    yield coordinator
    await coordinator.server.stop(0)


def start(coordinator: Coordinator, request_id: str):  # type: ignore[no-untyped-def]
    request = GenerationRequest(
        request_id=request_id, prompt=Prompt([1]), sampling=SamplingParams(max_tokens=4)
    )
    return coordinator.flow.start(request)


async def test_a_node_that_is_told_to_change_pools_is_routed_to_by_its_reports(
    coordinator: Coordinator,
) -> None:
    receiver = Receiver()
    async with attached(coordinator, receiver) as link:
        (member,) = coordinator.registry
        assert coordinator.flow.is_ready()
        member.send(SetRole(role=NodeRole.PREFILL))
        await until(lambda: receiver.role is NodeRole.PREFILL)
        link.report_load()
        await until(lambda: member.role is NodeRole.PREFILL)
        assert not coordinator.flow.is_ready(), "nobody is left to decode"
        assert coordinator.registry.ready(NodeRole.PREFILL) == [member]


async def test_a_request_goes_there_and_back(coordinator: Coordinator) -> None:
    receiver = Receiver()
    async with attached(coordinator, receiver):
        running = start(coordinator, "r")
        await until(lambda: receiver.started == ["r"])
        receiver.finish("r")
        async with asyncio.timeout(30):
            assert await output(running) == [7]
    await until(lambda: coordinator.num_members == 0)


@pytest.mark.parametrize("timeouts", [HASTY])
async def test_a_silent_node_is_lost_although_it_answers_pings(coordinator: Coordinator) -> None:
    async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
        stream = CoordinatorStub(channel).Attach()
        await stream.write(FROM_NODE.wrap(hello()))
        await stream.read()
        await until(lambda: coordinator.num_members == 1)
        await until(lambda: coordinator.num_members == 0)
        with pytest.raises(grpc.aio.AioRpcError, match="no message arrived"):
            await stream.read()


async def test_a_node_that_is_late_stays_a_member(coordinator: Coordinator) -> None:
    """Its gRPC threads answer pings, so its process is there; only its interpreter is busy."""
    async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
        stream = CoordinatorStub(channel).Attach()
        await stream.write(FROM_NODE.wrap(hello()))
        await until(lambda: coordinator.num_members == 1)
        (member,) = coordinator.registry
        await until(lambda: member.is_silent)
        assert list(coordinator.registry) == [member]
        await stream.write(FROM_NODE.wrap(LOAD))
        await until(lambda: not member.is_silent)
        assert list(coordinator.registry) == [member]


@pytest.mark.parametrize("timeouts", [HASTY])
async def test_a_node_that_hangs_is_lost_even_if_it_never_reads_that(
    coordinator: Coordinator,
) -> None:
    """Its gRPC threads still answer pings, so its connection is sound."""
    async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
        stream = CoordinatorStub(channel).Attach()
        await stream.write(FROM_NODE.wrap(hello()))
        await until(lambda: coordinator.num_members == 1)
        (member,) = coordinator.registry
        long = DecodeLeg(request_id="r", prompt=Prompt([2**30] * 50_000), sampling=SamplingParams())
        for _ in range(20):  # far more than fits between two processes
            member.send(long)
        await until(lambda: coordinator.num_members == 0)


async def test_a_connection_without_a_hello_is_cut(coordinator: Coordinator) -> None:
    async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
        stream = CoordinatorStub(channel).Attach()
        await stream.wait_for_connection()
        with pytest.raises(grpc.aio.AioRpcError, match="no message arrived"):
            async with asyncio.timeout(30):
                await stream.read()


async def test_another_message_instead_of_a_hello_is_refused(coordinator: Coordinator) -> None:
    async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
        stream = CoordinatorStub(channel).Attach()
        await stream.write(FROM_NODE.wrap(LoadReport(state=NodeState.READY, role=NodeRole.DECODE)))
        with pytest.raises(grpc.aio.AioRpcError, match="NodeHello first, not LoadReport"):
            await stream.read()


COSTS = StepCosts(knot_tokens=[1, 8], knot_s=[0.001, 0.002])
PERF = PerfReport(step=COSTS, token_budget=512, max_batch_size=64)
LOAD = LoadReport(state=NodeState.READY, role=NodeRole.DECODE)


@pytest.mark.parametrize(
    ("report", "complaint"),
    [
        (replace(PERF, token_budget=0), "token_budget 0"),
        (replace(PERF, max_batch_size=2**31 - 1), "max_batch_size 2147483647"),
        (replace(PERF, step=replace(COSTS, knot_s=[0.001])), "the knots must be positive"),
        (replace(PERF, step=replace(COSTS, knot_tokens=[8, 8])), "the knots must be positive"),
        (
            replace(PERF, step=replace(COSTS, knot_tokens=[], knot_s=[])),
            "the knots must be positive",
        ),
        (replace(PERF, step=replace(COSTS, knot_s=[0.0, 0.002])), "costs must be finite"),
        (replace(PERF, step=replace(COSTS, pair_s=nan)), "costs must be finite"),
        (replace(PERF, step=replace(COSTS, context_s=-1.0)), "costs must be finite"),
        (replace(PERF, transfers=[TransferCosts("shm", 0.0, inf)]), "costs must be finite"),
        (replace(LOAD, prefill_ratio=nan), "must be finite and not negative"),
        (replace(LOAD, decode_ratio=inf), "must be finite and not negative"),
        (replace(LOAD, queued_tokens=-1), "must be finite and not negative"),
    ],
)
def test_a_report_that_cannot_be_true_is_refused(
    report: PerfReport | LoadReport, complaint: str
) -> None:
    for plausible in (PERF, LOAD):
        plausible.check()
    with pytest.raises(MalformedMessage, match=complaint):
        report.check()


async def test_who_reports_what_cannot_be_true_is_cut_off(coordinator: Coordinator) -> None:
    async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
        stream = CoordinatorStub(channel).Attach()
        await stream.write(FROM_NODE.wrap(hello()))
        await stream.read()
        await stream.write(FROM_NODE.wrap(replace(PERF, token_budget=0)))
        with pytest.raises(grpc.aio.AioRpcError, match="PerfReport: token_budget 0"):
            await stream.read()
    await until(lambda: coordinator.num_members == 0)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (hello(model_id="x"), "serves 'x'"),
        (hello("d2", revision="x"), "their weights differ"),
        (
            hello("d2", revision="x", layout=replace(LAYOUT, dtype=KvDtype.INT8)),
            "KV is int8 and float32 .*same --kv-dtype",
        ),
        (
            hello("d2", revision="x", layout=replace(LAYOUT, rounded_to=KvDtype.FP8)),
            r"KV is rounded to fp8 and nothing .*one engine\.wire_dtype",
        ),
        (hello("d2", layout=replace(LAYOUT, dtype=KvDtype.BFLOAT16)), "with the same --dtype"),
        (hello("d2", layout=replace(LAYOUT, head_dim=96)), "in head_dim: .* same checkpoint"),
        (
            hello("d2", layout=replace(LAYOUT, num_layers=99, dtype=KvDtype.BFLOAT16)),
            "in layers, dtype: .* same checkpoint",
        ),
    ],
)
async def test_a_node_with_another_model_is_refused(
    coordinator: Coordinator, theirs: NodeHello, message: str
) -> None:
    receiver, refused = Receiver(), dict[str, str]()
    coordinator.registry.on_refused(refused.__setitem__)
    async with (
        attached(coordinator, receiver),
        open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel,
    ):
        stream = CoordinatorStub(channel).Attach()
        await stream.write(FROM_NODE.wrap(theirs))
        with pytest.raises(grpc.aio.AioRpcError, match=message):
            await stream.read()
    assert re.search(message, refused[theirs.node_id]), "and it is told to those who ask"


async def test_a_revision_with_a_share_may_be_in_a_folder_of_any_name(
    coordinator: Coordinator,
) -> None:
    coordinator.revisions.set({"4f0c": 1.0})
    async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
        stream = CoordinatorStub(channel).Attach()
        await stream.write(FROM_NODE.wrap(hello(model_id="m2", revision="4f0c1234")))
        await stream.read()
        assert coordinator.num_members == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"introduction_key": b""}, "has 32 bytes, this has 0"),
        ({"introduction_key": bytes(65)}, "has 32 bytes, this has 65"),
        ({"layout": replace(LAYOUT, block_size=0)}, "not a KV layout"),
        ({"layout": replace(LAYOUT, first_kv_head=1)}, "not a KV layout"),
        ({"protocol": PROTOCOL + 2}, f"speaks protocol {PROTOCOL + 2}, .* upgrade this process"),
    ],
)
async def test_a_node_that_cannot_be_is_refused(
    coordinator: Coordinator, changes: dict[str, object], message: str
) -> None:
    async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
        stream = CoordinatorStub(channel).Attach()
        await stream.write(FROM_NODE.wrap(replace(hello(), **changes)))
        with pytest.raises(grpc.aio.AioRpcError, match=message):
            await stream.read()
    assert coordinator.num_members == 0


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
async def test_a_node_of_the_build_before_or_behind_is_let_in(
    coordinator: Coordinator, protocol: int
) -> None:
    async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
        stream = CoordinatorStub(channel).Attach()
        await stream.write(FROM_NODE.wrap(replace(hello(), protocol=protocol)))
        assert isinstance(FROM_COORDINATOR.unwrap(await stream.read()), Welcome)


async def test_a_node_hears_why_it_is_not_let_in_until_it_is(coordinator: Coordinator) -> None:
    told: list[str] = []
    link = CoordinatorLink(
        f"127.0.0.1:{coordinator.port}",
        lambda: hello(model_id="other"),
        lambda: LoadReport(state=NodeState.READY, role=NodeRole.DECODE),
        Receiver(),
        TIMEOUTS,
        on_refused=lambda link: told.append(link.refusal),
    )
    running = asyncio.create_task(link.run())
    try:
        await until(lambda: bool(told))
        assert "serves 'other', this coordinator 'm'" in told[0]
        coordinator.model_id = "other"
        await until(lambda: link.is_attached)
        assert link.refusal == ""
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_second_node_with_the_same_id_is_refused_until_the_first_is_gone(
    coordinator: Coordinator,
) -> None:
    async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
        first, second, third = [CoordinatorStub(channel).Attach() for _ in range(3)]
        await first.write(FROM_NODE.wrap(replace(hello(), incarnation="1")))
        await first.read()
        await second.write(FROM_NODE.wrap(replace(hello(), incarnation="2")))
        taken = r"'d' is attached already, at .* its own"
        with pytest.raises(grpc.aio.AioRpcError, match=taken) as refused:
            await second.read()
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS, "so it tries again soon"
        assert [member.hello.incarnation for member in coordinator.registry] == ["1"]
        first.cancel()
        await until(lambda: coordinator.num_members == 0)
        await third.write(FROM_NODE.wrap(replace(hello(), incarnation="2")))
        await third.read()
        assert [member.hello.incarnation for member in coordinator.registry] == ["2"]
        third.cancel()


async def test_a_node_says_each_reason_once_why_it_is_not_attached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """First nobody listens, then its id is taken."""
    coordinator = Coordinator()
    await coordinator.start()
    port = coordinator.port
    await coordinator.server.stop(0)
    report = LoadReport(state=NodeState.READY, role=NodeRole.DECODE)
    link = CoordinatorLink(f"127.0.0.1:{port}", hello, lambda: report, Receiver(), TIMEOUTS)
    running = asyncio.create_task(link.run())
    try:
        await until(lambda: "UNAVAILABLE" in caplog.text)
        coordinator = Coordinator()
        first = coordinator.registry.add(replace(hello(), incarnation="another"), Outbox())
        await coordinator.start(port)
        await until(lambda: "ALREADY_EXISTS" in caplog.text)
        coordinator.registry.remove(first)
        await until(lambda: link.is_attached)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await coordinator.server.stop(0)
    for reason in ("UNAVAILABLE", "ALREADY_EXISTS"):
        assert caplog.text.count(reason) == 1


async def test_a_node_that_attaches_anew_is_not_heard_on_its_former_stream(
    coordinator: Coordinator,
) -> None:
    async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
        former, present = [CoordinatorStub(channel).Attach() for _ in range(2)]
        members = []
        for stream in (former, present):
            await stream.write(FROM_NODE.wrap(hello()))
            await stream.read()
            members += coordinator.registry
        assert len(members) == 2
        member = members[1]
        assert member is not members[0]
        await former.write(FROM_NODE.wrap(KvEvents(tier=KvTier.POOL, stored=[bytes(16)])))
        async with asyncio.timeout(30):
            assert await former.read() is grpc.aio.EOF
        assert list(coordinator.registry) == [member]
        assert not coordinator.flow._router.prefixes._holdings
        former.cancel()
        present.cancel()


async def test_a_node_waits_for_a_coordinator_and_finds_it_again() -> None:
    first, receiver = Coordinator(), Receiver()
    await first.start()
    async with attached(first, receiver) as link:
        running = start(first, "r")
        await until(lambda: receiver.started == ["r"])
        await first.server.stop(0)
        await until(lambda: receiver.cancelled == ["r"])
        running.cancel("the test is over")
        second = Coordinator()
        await second.start(first.port)
        await until(second.flow.is_ready)
        link.send(LoadReport(state=NodeState.READY, role=NodeRole.DECODE))
        await second.server.stop(0)


async def test_a_coordinator_that_never_answers_is_given_up() -> None:
    """The connection is accepted and stays silent: `connect_s` ends the attempt."""
    connections: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    link = CoordinatorLink(
        address,
        hello,
        lambda: LoadReport(state=NodeState.READY, role=NodeRole.DECODE),
        Receiver(),
        TIMEOUTS,
    )
    running = asyncio.create_task(link.run())
    await until(lambda: len(connections) >= 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    server.close()
    for writer in connections:
        writer.close()
        await writer.wait_closed()


async def test_bytes_that_are_no_message_end_the_stream_but_not_the_membership() -> None:
    """gRPC's client reads them as None."""
    num_attached = 0

    async def attach(_: object, context: RawContext) -> None:
        nonlocal num_attached
        num_attached += 1
        await context.read()
        welcome = Welcome(coordinator_id="c", incarnation="1", protocol=PROTOCOL)
        await context.write(FROM_COORDINATOR.wrap(welcome).SerializeToString())
        await context.write(b"\xff\xff\xff")
        await context.read()

    async with raw_coordinator(attach) as link:
        running = asyncio.create_task(link.run())
        await until(lambda: num_attached >= 2)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_receiver_that_raises_does_not_end_the_membership(
    coordinator: Coordinator,
) -> None:
    receiver = Receiver()
    receiver.start_decode = lambda leg, link: 1 / 0  # type: ignore[assignment]
    async with attached(coordinator, receiver):
        running = start(coordinator, "r")
        with pytest.raises(NodeLost):
            async with asyncio.timeout(30):
                await output(running)
        await until(coordinator.flow.is_ready)


def is_flushing(link: CoordinatorLink) -> bool:
    """Whether `leave` waits in its flush: nobody else waits for the end of the outbox."""
    return link._outbox is not None and bool(link._outbox._is_done._waiters)


@pytest.mark.parametrize("how", ["stops reading", "is gone"])
async def test_leaving_does_not_wait_for_a_coordinator_that(
    how: str,
) -> None:
    """Its deadline is for one that stays attached: the end of a stream is noticed as such."""
    leave_s = 0.2 if how == "stops reading" else 60.0
    is_over = asyncio.Event()

    async def attach(_: object, context: RawContext) -> None:
        await context.read()
        welcome = Welcome(coordinator_id="c", incarnation="1", protocol=PROTOCOL)
        await context.write(FROM_COORDINATOR.wrap(welcome).SerializeToString())
        await is_over.wait()

    async with raw_coordinator(attach, leave_s) as link:
        running = asyncio.create_task(link.run())
        await until(lambda: link._outbox is not None)
        event = TokenEvent(request_id="r", index=0, token_ids=[2**30] * 100_000)
        for _ in range(100):  # more than the stream's flow control lets through
            link.send(TokenBatch(events=[event]))
        leaving = asyncio.create_task(link.leave())
        await until(lambda: is_flushing(link))
        if how == "is gone":
            is_over.set()
        async with asyncio.timeout(30):
            await leaving
        is_over.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_nodes_of_different_weights_that_come_at_once_are_not_both_let_in() -> None:
    coordinator = Coordinator(Timeouts())  # patient: they say no more than hello
    await coordinator.start()
    try:
        async with open_channel(f"127.0.0.1:{coordinator.port}", 60) as channel:
            streams = [CoordinatorStub(channel).Attach() for _ in range(8)]
            await asyncio.gather(*(s.wait_for_connection() for s in streams))
            hellos = [FROM_NODE.wrap(hello(f"d{i}", revision=f"r{i}")) for i in range(8)]
            await asyncio.gather(*(s.write(h) for s, h in zip(streams, hellos, strict=True)))
            answers = await asyncio.gather(*(s.read() for s in streams), return_exceptions=True)
            assert sum(not isinstance(answer, Exception) for answer in answers) == 1
    finally:
        await coordinator.server.stop(0)


async def test_a_draining_node_is_told_when_no_leg_can_follow(coordinator: Coordinator) -> None:
    receiver = Receiver()
    async with attached(coordinator, receiver) as link:
        receiver.state = NodeState.DRAINING
        link.report_load()
        async with asyncio.timeout(30):
            await link.wait_drain_seen()
        assert not coordinator.flow.is_ready()
        await link.leave()
        await until(lambda: coordinator.num_members == 0)


async def test_a_message_that_cannot_be_sent_breaks_the_stream_instead_of_being_lost(
    coordinator: Coordinator,
) -> None:
    receiver = Receiver()
    async with attached(coordinator, receiver) as link:
        running = start(coordinator, "r")
        await until(lambda: receiver.started == ["r"])
        link.send(
            LoadReport(state=NodeState.READY, role=NodeRole.DECODE, queued_tokens=1 << 40)
        )  # an int32 on the wire
        await until(lambda: receiver.cancelled == ["r"])
        running.cancel("the test is over")
        await until(coordinator.flow.is_ready)  # attached again
