"""What is announced, what is pinned, and that it always comes to an end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from kv_transfer.exporter import Exporter, TicketRules
from kv_transfer.handshake import KvIdentity
from kv_transfer.lifecycle import KvPart, Progress
from kv_transfer.memory import ExportedPool
from kv_transfer.ticket import Ticket, read_ticket
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.kv import KvDtype, KvLayout
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import Announcement, HandoffEnded, HandoffRecord, Prompt, SamplingParams
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import PdserveError, RequestCancelled, TransferTimeout
from prefill_node.handoff import HeldKv
from prefill_node.handoffs import Handoffs

BLOCK = 4
NUM_LAYERS = 4
LAYOUT = KvLayout(NUM_LAYERS, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype=KvDtype.FLOAT32)
LAYER_BYTES = LAYOUT.layer_bytes  # of a block
LEASE_S = 0.05


class Node:
    """Handoffs over a real pool and exporter, without a network."""

    def __init__(
        self, announce_bytes: int = 0, layout: KvLayout = LAYOUT, num_blocks: int = 16
    ) -> None:
        memory = ExportedPool(num_blocks, layout.block_bytes)
        self.memory = memory
        self.pool = BlockPool(num_blocks, layout.block_size, bump_generations=memory.bump)
        self.settled: list[str] = []
        self.failed: list[tuple[str, PdserveError]] = []
        self.streams: dict[str, Request] = {}  # that decode here, by request id
        self.clock = ManualClock()
        self.exporter = Exporter(
            "p",
            "life",
            KvIdentity("m", "r", layout),
            memory,
            self.clock,
            tickets=TicketRules(with_checksums=True),
        )
        self.handoffs = Handoffs(
            self.exporter,
            self.pool,
            on_settled=self.settled.append,
            on_failed=lambda request_id, error: self.failed.append((request_id, error)),
            lease_s=LEASE_S,
            announce_bytes=announce_bytes,
            find=self.streams.get,
        )

    def request(self, num_tokens: int, request_id: str = "r") -> Request:
        return Request(
            request_id=request_id,
            prompt=Prompt(list(range(num_tokens))),
            sampling=SamplingParams(),
            lifecycle=Lifecycle(received_s=0.0),
            block_table=self.pool.allocate(-(-num_tokens // self.pool.block_size)),
            leg_token_limit=1,
        )

    def compute(self, request: Request, upto: int) -> None:
        """A step of the request is over, which was not its last one."""
        request.num_computed_tokens = upto
        self.handoffs.announce(request)

    def finish(self, request: Request) -> None:
        """Its last step is."""
        request.num_computed_tokens = request.num_prompt_tokens
        self.handoffs.publish(request, record(request))

    def step(self, *rows: tuple[Request, int]) -> tuple[list[Scheduled], list[int]]:
        """A step is about to run; after how many layers it will be asked for."""
        planned = [Scheduled(request, num_tokens) for request, num_tokens in rows]
        return planned, self.handoffs.begin_step(planned)

    def abandon(self, *requests: Request) -> None:
        """Cancel these, and let go of their blocks."""
        for request in requests:
            self.pool.release(request.block_table)
            self.handoffs.end(request.request_id, RequestCancelled("the test is over"))

    def check(self) -> None:
        """Nothing is left."""
        assert self.pool.num_free == self.pool.num_blocks, "blocks were lost"
        assert self.handoffs.num_pinned_blocks == 0
        self.pool.check_integrity()
        self.memory.close()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.check()


@pytest.fixture
def eager() -> Iterator[Node]:
    """It announces whatever it can in mid-step."""
    node = Node(announce_bytes=1)
    yield node
    node.check()


def record(request: Request) -> HandoffRecord:
    return HandoffRecord(
        request_id=request.request_id, num_tokens=request.num_prompt_tokens, token_ids=[7]
    )


def tickets(said: list[msgspec.Struct]) -> list[Ticket]:
    return [
        read_ticket(m.ticket)
        for m in said
        if isinstance(m, Announcement | HandoffRecord) and m.ticket
    ]


def parts(said: list[msgspec.Struct]) -> list[tuple[int, int, int, int]]:
    """(first token, end, first layer, end) of each ticket."""
    return [(t.first_token, t.end_token, t.first_layer, t.end_layer) for t in tickets(said)]


async def test_chunks_are_announced_as_their_blocks_fill_up(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    request = node.request(10)
    node.handoffs.open("r")
    node.handoffs.subscribe("r", heard.append)
    node.compute(request, 3)  # no block is full
    assert heard == []
    node.compute(request, 9)  # two are; the third is still being written
    node.finish(request)  # the prompt's end completes it
    first, second = tickets(heard)
    assert (first.first_token, first.num_tokens, first.block_ids) == (0, 8, request.block_table[:2])
    assert (second.first_token, second.num_tokens) == (8, 2)
    assert second.block_ids == request.block_table[2:]
    assert [type(m) for m in heard] == [Announcement, HandoffRecord]  # the last part travels along
    node.pool.release(request.block_table)  # the engine lets go
    assert node.handoffs.num_pinned_blocks == 3
    node.handoffs.settle("r", heard.append, was_pulled=True)
    assert node.settled == ["r"]


async def test_a_ticket_is_void_once_its_blocks_are_settled(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    request = node.request(5)
    node.handoffs.open("r")
    node.handoffs.subscribe("r", heard.append)
    node.compute(request, 4)
    (ticket,) = tickets(heard)
    node.pool.release(request.block_table)
    generations = node.memory.generations
    assert generations[ticket.block_ids[0]] == ticket.generations[0]
    node.handoffs.settle("r", heard.append, was_pulled=True)
    assert generations[ticket.block_ids[0]] != ticket.generations[0]


async def test_a_late_subscriber_hears_everything_from_the_start(node: Node) -> None:
    request = node.request(8)
    node.handoffs.open("r")
    node.compute(request, 4)
    node.finish(request)
    node.pool.release(request.block_table)
    first: list[msgspec.Struct] = []
    second: list[msgspec.Struct] = []  # of a second decode node, after the first one died
    for heard in (first, second):
        node.handoffs.subscribe("r", heard.append)
        node.handoffs.unsubscribe("r", first.append)
        assert [type(m) for m in heard] == [Announcement, HandoffRecord]
        assert parts(heard) == [(0, 8, 0, NUM_LAYERS)]
    node.handoffs.settle("r", second.append, was_pulled=True)


async def test_a_subscriber_may_come_before_the_leg(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    node.handoffs.subscribe("r", heard.append)
    node.handoffs.open("r")
    await asyncio.sleep(2 * LEASE_S)  # no lease runs any more
    assert heard == []
    request = node.request(5)
    node.compute(request, 4)
    assert len(tickets(heard)) == 1
    node.pool.release(request.block_table)
    node.handoffs.settle("r", heard.append, was_pulled=False)


async def test_a_leg_that_never_comes_is_reported_to_the_subscriber(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    node.handoffs.subscribe("r", heard.append)
    await asyncio.sleep(2 * LEASE_S)
    (ended,) = heard
    assert isinstance(ended, HandoffEnded)
    assert ended.code == TransferTimeout.code
    assert node.failed == []  # there is no leg to fail


@pytest.mark.parametrize("was_subscribed", [False, True])
async def test_nobody_coming_for_it_ends_a_handoff(node: Node, was_subscribed: bool) -> None:
    request = node.request(8)
    node.handoffs.open("r")
    heard: list[msgspec.Struct] = []
    if was_subscribed:
        node.handoffs.subscribe("r", heard.append)
    node.finish(request)
    node.pool.release(request.block_table)
    if was_subscribed:
        await asyncio.sleep(2 * LEASE_S)
        assert node.handoffs.num_pinned_blocks == 2, "a subscriber keeps the lease alive"
        node.handoffs.unsubscribe("r", heard.append)
    await asyncio.sleep(2 * LEASE_S)
    ((request_id, error),) = node.failed
    assert request_id == "r"
    assert isinstance(error, TransferTimeout)


async def test_a_subscriber_that_asked_twice_still_leaves_at_once(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    request = node.request(4)
    node.handoffs.open("r")
    node.handoffs.subscribe("r", heard.append)
    node.handoffs.subscribe("r", heard.append)
    node.finish(request)
    assert len(heard) == 1
    node.pool.release(request.block_table)
    node.handoffs.unsubscribe("r", heard.append)
    await asyncio.sleep(2 * LEASE_S)
    assert [request_id for request_id, _ in node.failed] == ["r"]


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
    node.handoffs.settle("r", heard.append, was_pulled=False)  # comes too late
    assert node.settled == []


# ---- several subscribers, renewals -------------------------------------------------------------


async def test_the_last_of_several_pullers_frees_the_blocks(node: Node) -> None:
    first: list[msgspec.Struct] = []
    second: list[msgspec.Struct] = []
    request = node.request(8)
    node.handoffs.open("r")
    node.handoffs.subscribe("r", first.append)
    node.handoffs.subscribe("r", second.append)
    node.finish(request)
    node.pool.release(request.block_table)
    assert tickets(first) == tickets(second)
    node.handoffs.settle("r", first.append, was_pulled=True)
    node.handoffs.settle("r", first.append, was_pulled=True)  # its second word changes nothing
    assert node.handoffs.num_pinned_blocks == 2
    assert node.settled == []
    node.handoffs.unsubscribe("r", second.append)
    assert node.settled == ["r"]


async def test_one_that_has_not_subscribed_settles_nothing(node: Node) -> None:
    """It means a former handoff of the request."""
    heard: list[msgspec.Struct] = []
    request = node.request(8)
    node.handoffs.open("r")
    node.finish(request)
    node.pool.release(request.block_table)
    node.handoffs.settle("r", heard.append, was_pulled=False)
    assert node.handoffs.num_pinned_blocks == 2
    node.handoffs.subscribe("r", heard.append)
    node.handoffs.settle("r", heard.append, was_pulled=True)


async def test_renewed_tickets_are_for_all_that_was_announced(node: Node) -> None:
    heard: list[msgspec.Struct] = []
    request = node.request(10)
    node.handoffs.open("r")
    node.handoffs.subscribe("r", heard.append)
    node.compute(request, 4)
    node.clock.advance(100.0)
    node.handoffs.renew("r", heard.append)
    old, new = heard
    assert isinstance(old, Announcement)
    assert isinstance(new, Announcement)
    assert (old.is_restart, new.is_restart) == (False, True)
    assert read_ticket(new.ticket).expires_at_s == read_ticket(old.ticket).expires_at_s + 100.0
    node.finish(request)
    heard.clear()
    node.handoffs.renew("r", heard.append)
    assert parts(heard) == [(0, 10, 0, NUM_LAYERS)]
    assert [type(m) for m in heard] == [Announcement, HandoffRecord]
    node.pool.release(request.block_table)
    node.handoffs.settle("r", heard.append, was_pulled=True)
    node.handoffs.renew("r", heard.append)
    assert len(heard) == 2


# ---- layer by layer ----------------------------------------------------------------------------


async def test_a_large_step_is_announced_layer_by_layer(eager: Node) -> None:
    heard: list[msgspec.Struct] = []
    request = eager.request(10)
    eager.handoffs.open("r")
    eager.handoffs.subscribe("r", heard.append)
    rows, ends = eager.step((request, 10))
    assert ends == [1, 2, 3]
    for num_layers in ends:
        eager.handoffs.layers_done(rows, num_layers)
    eager.finish(request)
    assert parts(heard) == [(0, 10, 0, 1), (0, 10, 1, 2), (0, 10, 2, 3), (0, 10, 3, 4)]
    assert isinstance(heard[-1], HandoffRecord)
    heard.clear()
    eager.handoffs.renew("r", heard.append)
    assert parts(heard) == [(0, 10, 0, 4)]
    eager.pool.release(request.block_table)
    eager.handoffs.settle("r", heard.append, was_pulled=True)


async def test_a_late_subscriber_hears_of_a_chunk_that_is_half_done(eager: Node) -> None:
    request = eager.request(12)
    eager.handoffs.open("r")
    eager.compute(request, 4)
    rows, _ = eager.step((request, 5))
    eager.handoffs.layers_done(rows, 3)
    heard: list[msgspec.Struct] = []
    eager.handoffs.subscribe("r", heard.append)
    assert parts(heard) == [(0, 4, 0, 4), (4, 8, 0, 3)]
    assert [m.is_restart for m in heard if isinstance(m, Announcement)] == [True, False]
    eager.compute(request, 9)
    assert parts(heard)[2:] == [(4, 8, 3, 4)]
    eager.pool.release(request.block_table)
    eager.handoffs.settle("r", heard.append, was_pulled=True)


async def test_layers_are_announced_only_where_it_is_worth_it() -> None:
    node = Node(announce_bytes=2 * LAYER_BYTES)
    heard: dict[str, list[msgspec.Struct]] = {"small": [], "large": []}
    small, large = node.request(4, "small"), node.request(16, "large")
    for request in (small, large):
        node.handoffs.open(request.request_id)
        node.handoffs.subscribe(request.request_id, heard[request.request_id].append)
    assert node.step((small, 4))[1] == [2]  # four layers of a block
    assert node.step((small, 3))[1] == [], "the open block is not announced at all"
    rows, ends = node.step((small, 4), (large, 16))
    assert ends == [1, 2, 3]
    for num_layers in ends:
        node.handoffs.layers_done(rows, num_layers)
    assert parts(heard["small"]) == [(0, 4, 0, 2)]
    assert parts(heard["large"]) == [(0, 16, n, n + 1) for n in range(3)]
    node.abandon(small, large)
    node.check()


async def test_what_the_prefix_cache_had_is_announced_before_the_step(eager: Node) -> None:
    heard: list[msgspec.Struct] = []
    request = eager.request(10)
    request.num_computed_tokens = 8
    eager.handoffs.open("r")
    eager.handoffs.subscribe("r", heard.append)
    _, ends = eager.step((request, 2))
    assert parts(heard) == [(0, 8, 0, 4)]
    assert ends
    eager.finish(request)
    assert parts(heard)[1:] == [(8, 10, 0, 4)]
    eager.abandon(request)


@pytest.mark.parametrize(
    ("again", "announced"),
    [
        (8, [(0, 8, 2, 3), (0, 8, 3, 4)]),  # the same chunk: where it had come to
        (12, [(0, 8, 2, 4), (8, 12, 0, 4)]),  # a longer one
        (4, [(0, 4, 2, 4)]),  # a shorter one
    ],
)
async def test_a_repeated_step_announces_nothing_twice(
    eager: Node, again: int, announced: list[tuple[int, int, int, int]]
) -> None:
    heard: list[msgspec.Struct] = []
    request = eager.request(20)
    eager.handoffs.open("r")
    eager.handoffs.subscribe("r", heard.append)
    rows, _ = eager.step((request, 8))
    eager.handoffs.layers_done(rows, 2)
    heard.clear()  # the step failed, for another request
    rows, _ = eager.step((request, again))
    for num_layers in (1, 2, 3):
        eager.handoffs.layers_done(rows, num_layers)
    eager.compute(request, again)
    assert parts(heard) == announced
    eager.finish(request)
    progress = Progress(NUM_LAYERS)
    eager.handoffs.layers_done(rows, 3)  # too late
    for part in [(0, 8, 0, 2), *parts(heard)]:
        progress.take(KvPart(*part))
    assert progress.num_tokens == 20
    eager.abandon(request)


async def test_nothing_is_to_come_of_a_handoff_that_ended_before_the_step(
    eager: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise ValueError("an odd fault")

    request = eager.request(9)
    eager.handoffs.open("r")
    eager.handoffs.subscribe("r", lambda message: None)
    request.num_computed_tokens = 4  # the prefix cache had them
    monkeypatch.setattr(Exporter, "issue", fail)
    _, ends = eager.step((request, 5))
    assert ends == []
    assert [request_id for request_id, _ in eager.failed] == ["r"]
    eager.abandon(request)


async def test_a_stream_that_loses_its_blocks_in_mid_step_is_announced_from_its_new_ones(
    eager: Node,
) -> None:
    """Layers of the dropped step used to be announced, and the others from the same old block."""
    heard: list[msgspec.Struct] = []
    eager.streams["r"] = stream = eager.request(9)
    stream.leg_token_limit, stream.output_token_ids, stream.num_computed_tokens = (
        None,
        [1, 2, 3],
        11,
    )
    eager.handoffs.subscribe_to_stream("r", heard.append, 3, "r~1")
    rows, _ = eager.step((stream, 1))
    for num_layers in (1, 2, 3):
        eager.handoffs.layers_done(rows, num_layers)
    eager.pool.release(stream.block_table)  # it took too much memory: the stream is preempted
    stream.block_table, stream.num_computed_tokens = eager.pool.allocate(3), 0
    eager.compute(stream, 12)
    last = [ticket for ticket in tickets(heard) if ticket.first_token == 8]
    assert {tuple(ticket.block_ids) for ticket in last} == {tuple(stream.block_table[2:])}
    assert parts(heard)[-len(last) :] == [(8, 12, 0, NUM_LAYERS)]
    eager.pool.release(stream.block_table)
    eager.handoffs.settle("r", heard.append, was_pulled=False)


def refuse(message: msgspec.Struct) -> None:
    raise OSError("the session is broken")


async def test_an_end_that_cannot_be_told_to_one_is_told_to_others_and_frees_all(
    node: Node,
) -> None:
    heard: list[msgspec.Struct] = []
    request = node.request(9)
    node.handoffs.open("r")
    node.handoffs.subscribe("r", refuse, at_end=True)
    node.handoffs.subscribe("r", heard.append)
    node.compute(request, 9)
    node.pool.release(request.block_table)
    node.handoffs.end("r", RequestCancelled("client disconnected"))
    assert isinstance(heard[-1], HandoffEnded)


async def test_a_leg_fails_when_its_lease_is_over_even_if_nobody_can_be_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("an odd fault")

    request = node.request(9)
    node.handoffs.open("r")
    node.finish(request)
    node.pool.release(request.block_table)
    release = HeldKv.release
    monkeypatch.setattr(HeldKv, "release", lambda held: (release(held), fail()))
    ended = asyncio.Event()
    monkeypatch.setattr(node.handoffs, "_on_failed", lambda *_: ended.set())
    async with asyncio.timeout(30):
        await ended.wait()


async def test_cancelled_in_mid_step_nothing_more_is_announced(eager: Node) -> None:
    heard: list[msgspec.Struct] = []
    request = eager.request(8)
    eager.handoffs.open("r")
    eager.handoffs.subscribe("r", heard.append)
    rows, _ = eager.step((request, 8))
    eager.handoffs.layers_done(rows, 1)
    request.is_cancelled = True
    eager.handoffs.end("r", RequestCancelled("client disconnected"))
    eager.handoffs.open("r")  # the id comes again, while the step still runs
    eager.handoffs.layers_done(rows, 2)
    assert eager.handoffs.num_pinned_blocks == 0
    eager.abandon(request)


async def test_what_no_ticket_has_room_for_takes_several() -> None:
    """With checksums for each KV head, as models with many heads and long prompts have them."""
    layout = KvLayout(2, num_kv_heads=4096, head_dim=1, block_size=1, dtype=KvDtype.FLOAT32)
    node = Node(announce_bytes=1, layout=layout, num_blocks=130)
    assert node.exporter.max_ticket_blocks == 63
    heard: list[msgspec.Struct] = []
    node.handoffs.open("r")
    node.handoffs.subscribe("r", heard.append)
    request = node.request(130)
    rows, ends = node.step((request, 20))
    assert ends == [1]
    node.handoffs.layers_done(rows, 1)
    node.compute(request, 20)
    rows, ends = node.step((request, 110))
    assert ends == [], "there would be nothing to announce"
    node.handoffs.layers_done(rows, 1)  # of more tokens than a ticket has room for
    assert parts(heard) == [(0, 20, 0, 1), (0, 20, 1, 2)]
    node.finish(request)
    assert parts(heard)[2:] == [(20, 83, 0, 2), (83, 130, 0, 2)]
    assert isinstance(heard[-1], HandoffRecord)
    assert heard[-1].ticket
    del heard[:]
    node.handoffs.renew("r", heard.append)
    assert parts(heard) == [(0, 63, 0, 2), (63, 126, 0, 2), (126, 130, 0, 2)]
    assert [m.is_restart for m in heard if isinstance(m, Announcement)] == [True, False, False]
    assert node.failed == []
    node.abandon(request)
    node.check()
