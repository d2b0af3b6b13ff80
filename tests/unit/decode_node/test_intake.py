"""Taking requests over: order, room, failures; with a scripted exporter and a recording puller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest

from decode_node.intake import Intake
from decode_node.scheduler import DecodeFirst
from kv_transfer.puller import PullResult
from pdserve.clock import ManualClock
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.engine import Engine
from pdserve.errors import MalformedMessage, PeerLost, RequestCancelled, StaleTicket
from pdserve.node.session_client import Session
from pdserve.protocol import (
    Announcement,
    DecodeLeg,
    HandoffEnded,
    HandoffRecord,
    NodeAddress,
    SamplingParams,
    Settle,
)

BLOCK = 4
NUM_BLOCKS = 8
SOURCE = NodeAddress(node_id="p", incarnation="1", session_address="p:1")


class RecordingOutbox:
    """Keeps what was sent to the exporter."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)


@dataclass
class ScriptedPuller:
    """Records pulls; each waits for `gate`, and raises `error` if there is one."""

    pulled: list[tuple[bytes, list[int], int]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    is_writing: bool = False

    async def pull(
        self, link: object, ticket: bytes, block_table: list[int], from_token: int, timeout_s: float
    ) -> PullResult:
        self.pulled.append((ticket, list(block_table), from_token))
        self.is_writing = True
        try:
            await self.gate.wait()
        finally:
            self.is_writing = False
        if self.error is not None:
            raise self.error
        first, end = map(int, ticket.split(b"-"))
        return PullResult(bytes=1, seconds=0.25, first_token=first, end_token=end)


class Bench:
    """An intake over a real engine that is not running, and one scripted session."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK, bump_generations=self._check_not_written)
        clock = ManualClock()
        self.engine = Engine(self.pool, DecodeFirst(16, 8), clock, frozenset())
        self.puller = ScriptedPuller()
        self.outbox = RecordingOutbox()
        self.session = Session(SOURCE, None, self.outbox, clock)  # type: ignore[arg-type]
        self.intake = Intake(self.engine, self, self.puller, clock, 5.0)  # type: ignore[arg-type]

    def _check_not_written(self, block_ids: object) -> None:
        assert not self.puller.is_writing, "blocks were freed under a running pull"

    async def get(self, peer: NodeAddress) -> Session:
        assert peer is SOURCE
        return self.session

    def take(self, request_id: str = "r", num_tokens: int = 10) -> asyncio.Task[None]:
        leg = DecodeLeg(
            request_id=request_id,
            token_ids=list(range(num_tokens)),
            sampling=SamplingParams(max_tokens=4),
            source=SOURCE,
        )
        return asyncio.create_task(self.intake.take(leg, SOURCE))

    def announce(self, ticket: bytes, request_id: str = "r") -> None:
        self.session.receive(Announcement(request_id=request_id, ticket=ticket))

    def record(
        self, request_id: str = "r", num_tokens: int = 10, output: tuple[int, ...] = (42,)
    ) -> None:
        self.session.receive(
            HandoffRecord(request_id=request_id, num_tokens=num_tokens, token_ids=list(output))
        )

    def settled(self) -> list[tuple[str, bool]]:
        return [(m.request_id, m.pulled) for m in self.outbox.sent if isinstance(m, Settle)]


async def turn() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    for request in list(bench.engine.queues.running):
        bench.engine.cancel(request.request_id)
    assert bench.pool.num_free == NUM_BLOCKS, "blocks were lost"
    assert bench.intake.num_waiting == 0
    bench.pool.check_integrity()


async def test_chunks_are_pulled_as_they_come_and_the_request_adopted(bench: Bench) -> None:
    taking = bench.take()
    await turn()
    assert bench.pool.num_free == NUM_BLOCKS, "no room is taken before there is anything to pull"
    bench.announce(b"0-8")
    await turn()
    assert [ticket for ticket, _, _ in bench.puller.pulled] == [b"0-8"]
    bench.announce(b"8-10")
    bench.record()
    bench.puller.gate.set()
    await asyncio.wait_for(taking, 1)
    (request,) = bench.engine.queues.running
    assert [ticket for ticket, _, _ in bench.puller.pulled] == [b"0-8", b"8-10"]
    assert all(table == request.block_table for _, table, _ in bench.puller.pulled)
    assert request.output_token_ids == [42]
    assert request.num_computed_tokens == 10
    assert request.is_decoding
    assert request.lifecycle.transfer_s == 0.5
    assert bench.settled() == [("r", True)]


async def test_a_prefix_held_here_is_not_pulled_again(bench: Bench) -> None:
    bench.puller.gate.set()
    for request_id in ("a", "b"):
        taking = bench.take(request_id)
        await turn()
        bench.announce(b"0-10", request_id)
        bench.record(request_id)
        await asyncio.wait_for(taking, 1)
    assert [from_token for _, _, from_token in bench.puller.pulled] == [0, 8]
    first, second = bench.engine.queues.running
    assert first.block_table[:2] == second.block_table[:2]


async def test_without_room_the_kv_waits_where_it_is(bench: Bench) -> None:
    taken = bench.pool.allocate(6)
    taking = [bench.take("first"), bench.take("second", num_tokens=3)]
    await turn()
    bench.announce(b"0-10", "first")
    await turn()
    bench.announce(b"0-3", "second")
    await turn()
    assert bench.intake.num_waiting == 2  # the second would fit, but it is not its turn
    assert bench.puller.pulled == []
    bench.pool.release(taken)
    await turn()
    assert {ticket for ticket, _, _ in bench.puller.pulled} == {b"0-10", b"0-3"}
    for task in taking:
        task.cancel()
    await asyncio.gather(*taking, return_exceptions=True)


@pytest.mark.parametrize("stage", ["before", "waiting", "pulling"])
async def test_a_cancel_leaves_nothing_behind(bench: Bench, stage: str) -> None:
    blocked = bench.pool.allocate(NUM_BLOCKS) if stage == "waiting" else []
    taking = bench.take()
    await turn()
    if stage != "before":
        bench.announce(b"0-10")
        await turn()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert bench.settled() == [("r", False)]
    bench.pool.release(blocked)


@pytest.mark.parametrize("stage", ["before", "waiting", "pulling"])
async def test_losing_the_exporter_ends_the_intake(bench: Bench, stage: str) -> None:
    blocked = bench.pool.allocate(NUM_BLOCKS) if stage == "waiting" else []
    taking = bench.take()
    await turn()
    if stage != "before":
        bench.announce(b"0-10")
        await turn()
    bench.session.lose(PeerLost("p is gone"))
    bench.puller.gate.set()
    with pytest.raises(PeerLost, match="p is gone"):
        await asyncio.wait_for(taking, 1)
    bench.pool.release(blocked)


async def test_a_stale_ticket_ends_the_intake(bench: Bench) -> None:
    bench.puller.error = StaleTicket("block 3 changed hands")
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(b"0-10")
    with pytest.raises(StaleTicket):
        await asyncio.wait_for(taking, 1)
    assert bench.settled() == [("r", False)]


async def test_an_ended_handoff_ends_the_intake(bench: Bench) -> None:
    taking = bench.take()
    await turn()
    bench.session.receive(
        HandoffEnded(request_id="r", code=RequestCancelled.code, message="cancelled")
    )
    with pytest.raises(RequestCancelled):
        await asyncio.wait_for(taking, 1)


async def test_a_gap_between_tickets_is_refused(bench: Bench) -> None:
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(b"0-4")
    bench.announce(b"8-10")
    with pytest.raises(MalformedMessage, match="after 4 tokens of r came a ticket"):
        await asyncio.wait_for(taking, 1)


async def test_a_handoff_that_ends_is_heard_while_waiting_for_room(bench: Bench) -> None:
    blocked = bench.pool.allocate(NUM_BLOCKS)
    taking = bench.take()
    await turn()
    bench.announce(b"0-10")
    await turn()
    assert bench.intake.num_waiting == 1
    bench.session.receive(
        HandoffEnded(request_id="r", code=RequestCancelled.code, message="cancelled")
    )
    with pytest.raises(RequestCancelled):
        await asyncio.wait_for(taking, 1)
    bench.pool.release(blocked)


async def test_a_record_that_contradicts_the_leg_is_refused(bench: Bench) -> None:
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(b"0-9")
    bench.record(num_tokens=9)
    with pytest.raises(MalformedMessage, match="9 prompt tokens"):
        await asyncio.wait_for(taking, 1)


@pytest.mark.parametrize("output", [(), (42, 43)])
async def test_a_record_without_exactly_token_one_is_refused(
    bench: Bench, output: tuple[int, ...]
) -> None:
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(b"0-10")
    bench.record(output=output)
    with pytest.raises(MalformedMessage, match=f"{len(output)} of output"):
        await asyncio.wait_for(taking, 1)
