"""What is announced, what is pinned, and that it always comes to an end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.memory import ExportedPool
from kv_transfer.ticket import Ticket, read_ticket
from pdserve.clock import SystemClock
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.request import Request
from pdserve.errors import DeadlineExceeded, PdserveError, RequestCancelled
from pdserve.kv_layout import KvDtype, KvLayout
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import Announcement, HandoffEnded, HandoffRecord, SamplingParams
from prefill_node.handoff import Handoffs

BLOCK = 4
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype=KvDtype.FLOAT32)
LEASE_S = 0.05


class Node:
    """Handoffs over a real pool and exporter, without a network."""

    def __init__(self) -> None:
        memory = ExportedPool(16, LAYOUT.block_bytes)
        self.memory = memory
        self.pool = BlockPool(16, BLOCK, bump_generations=memory.bump)
        self.settled: list[str] = []
        self.expired: list[tuple[str, PdserveError]] = []
        exporter = Exporter("p", "life", KvIdentity("m", "r", LAYOUT), memory, SystemClock())
        self.handoffs = Handoffs(
            exporter,
            BLOCK,
            retain=self.pool.retain,
            release=self.pool.release,
            on_settled=self.settled.append,
            on_expired=lambda request_id, error: self.expired.append((request_id, error)),
            lease_s=LEASE_S,
        )

    def request(self, num_tokens: int, request_id: str = "r") -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=list(range(num_tokens)),
            sampling=SamplingParams(),
            lifecycle=Lifecycle(received_s=0.0),
            block_table=self.pool.allocate(-(-num_tokens // BLOCK)),
        )

    def compute(self, request: Request, upto: int) -> None:
        request.num_computed_tokens = upto
        self.handoffs.announce(request)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    assert node.pool.num_free == 16, "blocks were lost"
    assert node.handoffs.num_pinned_blocks == 0
    node.pool.check_integrity()
    node.memory.close()


def record(request: Request) -> HandoffRecord:
    return HandoffRecord(
        request_id=request.request_id, num_tokens=request.num_prompt_tokens, token_ids=[7]
    )


def tickets(said: list[msgspec.Struct]) -> list[Ticket]:
    return [read_ticket(m.ticket) for m in said if isinstance(m, Announcement)]


async def test_chunks_are_announced_as_their_blocks_fill_up(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    request = node.request(10)
    node.handoffs.open("r")
    node.handoffs.subscribe("r", heard.append)
    node.compute(request, 3)  # no block is full
    assert heard == []
    node.compute(request, 9)  # two are; the third is still being written
    node.compute(request, 10)  # the prompt's end completes it
    node.handoffs.publish(record(request))
    first, second = tickets(heard)
    assert (first.first_token, first.num_tokens, first.block_ids) == (0, 8, request.block_table[:2])
    assert (second.first_token, second.num_tokens) == (8, 2)
    assert second.block_ids == request.block_table[2:]
    assert isinstance(heard[-1], HandoffRecord)
    node.pool.release(request.block_table)  # the engine lets go
    assert node.handoffs.num_pinned_blocks == 3
    node.handoffs.settle("r", was_pulled=True)
    assert node.settled == ["r"]


async def test_a_ticket_is_void_once_its_blocks_are_settled(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    request = node.request(4)
    node.handoffs.open("r")
    node.handoffs.subscribe("r", heard.append)
    node.compute(request, 4)
    (ticket,) = tickets(heard)
    node.pool.release(request.block_table)
    generations = node.memory.generations
    assert generations[ticket.block_ids[0]] == ticket.generations[0]
    node.handoffs.settle("r", was_pulled=True)
    assert generations[ticket.block_ids[0]] != ticket.generations[0]


async def test_a_late_subscriber_hears_everything_from_the_start(node: Node) -> None:
    request = node.request(8)
    node.handoffs.open("r")
    node.compute(request, 4)
    node.compute(request, 8)
    node.handoffs.publish(record(request))
    node.pool.release(request.block_table)
    for _ in range(2):  # a second decode node, after the first one died
        heard: list[msgspec.Struct] = []
        node.handoffs.subscribe("r", heard.append)
        assert [type(m) for m in heard] == [Announcement, Announcement, HandoffRecord]
        node.handoffs.unsubscribe("r", heard.append)
    node.handoffs.settle("r", was_pulled=True)


async def test_a_subscriber_may_come_before_the_leg(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    node.handoffs.subscribe("r", heard.append)
    node.handoffs.open("r")
    await asyncio.sleep(2 * LEASE_S)  # no lease runs any more
    assert heard == []
    request = node.request(4)
    node.compute(request, 4)
    assert len(tickets(heard)) == 1
    node.pool.release(request.block_table)
    node.handoffs.settle("r", was_pulled=False)


async def test_a_leg_that_never_comes_is_reported_to_the_subscriber(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    node.handoffs.subscribe("r", heard.append)
    await asyncio.sleep(2 * LEASE_S)
    (ended,) = heard
    assert isinstance(ended, HandoffEnded)
    assert ended.code == DeadlineExceeded.code
    assert node.expired == []  # there is no leg to fail


@pytest.mark.parametrize("was_subscribed", [False, True])
async def test_nobody_coming_for_it_ends_a_handoff(node: Node, was_subscribed: bool) -> None:
    request = node.request(8)
    node.handoffs.open("r")
    heard: list[msgspec.Struct] = []
    if was_subscribed:
        node.handoffs.subscribe("r", heard.append)
    node.compute(request, 8)
    node.handoffs.publish(record(request))
    node.pool.release(request.block_table)
    if was_subscribed:
        await asyncio.sleep(2 * LEASE_S)
        assert node.handoffs.num_pinned_blocks == 2, "a subscriber keeps the lease alive"
        node.handoffs.unsubscribe("r", heard.append)
    await asyncio.sleep(2 * LEASE_S)
    ((request_id, error),) = node.expired
    assert request_id == "r"
    assert isinstance(error, DeadlineExceeded)


async def test_a_subscriber_that_asked_twice_still_leaves_at_once(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    request = node.request(4)
    node.handoffs.open("r")
    node.handoffs.subscribe("r", heard.append)
    node.handoffs.subscribe("r", heard.append)
    node.compute(request, 4)
    node.handoffs.publish(record(request))
    assert len(heard) == 2
    node.pool.release(request.block_table)
    node.handoffs.unsubscribe("r", heard.append)
    await asyncio.sleep(2 * LEASE_S)
    assert [request_id for request_id, _ in node.expired] == ["r"]


async def test_cancelling_takes_the_blocks_back_at_once(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    request = node.request(8)
    node.handoffs.open("r")
    node.handoffs.subscribe("r", heard.append)
    node.compute(request, 4)
    node.pool.release(request.block_table)
    node.handoffs.end("r", RequestCancelled("client disconnected"))
    assert isinstance(heard[-1], HandoffEnded)
    assert heard[-1].code == RequestCancelled.code
    node.compute(request, 8)  # a step that was running meanwhile: announces nothing
    node.handoffs.end("r", RequestCancelled("again"))
    node.handoffs.settle("r", was_pulled=False)
    assert node.settled == []
