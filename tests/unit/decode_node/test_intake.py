"""Taking requests over: order, room, failures; with a scripted exporter and a recording puller."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec.structs import astuple

from decode_node.arrival import AnnouncedPulls
from decode_node.intake import Intake
from decode_node.room import RoomQueue
from kv_transfer.links.link import Link
from kv_transfer.puller import PullResult
from kv_transfer.ticket import read_ticket
from pdserve.engine.engine import Engine
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.scheduler import Queues
from pdserve.measured.perf_model import PerfModel
from pdserve.metrics import NodeMetrics
from pdserve.node.legs import KeptScores
from pdserve.node.prefixes.cost import PullCosts
from pdserve.node.prefixes.offers import Fetched, Prefix
from pdserve.node.preparation import Preparation
from pdserve.protocol import (
    DecodeLeg,
    HandoffEnded,
    HandoffRecord,
    HeadRow,
    PrefixSource,
    Prompt,
    PromptLogprobs,
    SamplingParams,
    Subscribe,
    TokenLogprobs,
)
from pdserve.settings.timeouts import Timeouts
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import (
    GrammarFailed,
    MalformedMessage,
    PdserveError,
    PeerLost,
    RequestCancelled,
    RequestEnded,
    StaleIncarnation,
    StaleTicket,
    TicketInvalid,
    TransferTimeout,
)
from tests.fakes.exporter import BLOCK, HOST, SOURCE, ScriptedExporter, make_ticket
from tests.fakes.runner import decode_policy
from tests.unit.node.compilers import SlowCompiler
from tests.waits import turn

NUM_BLOCKS = 8
TIMEOUTS = Timeouts(transfer_s=5.0, ticket_s=30.0)

Part = tuple[int, int, int, int]  # first token, end, first layer, end


@dataclass
class ScriptedPuller:
    """Records pulls; each waits for `gate`, and raises `error` if there is one."""

    clock: ManualClock
    pulled: list[tuple[Part, list[int], int]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    is_writing: bool = False
    read_s: float = 0.25
    timeouts_s: list[float] = field(default_factory=list)

    async def pull(
        self,
        link: Link,
        ticket: bytes,
        block_table: Sequence[int],
        from_token: int,
        timeout_s: float,
        *,
        num_tokens: int | None = None,
    ) -> PullResult:
        opened = read_ticket(ticket)
        part = (opened.first_token, opened.end_token, opened.first_layer, opened.end_layer)
        self.pulled.append((part, list(block_table), from_token))
        self.timeouts_s.append(timeout_s)
        self.is_writing = True
        try:
            await self.gate.wait()
        finally:
            self.is_writing = False
        if self.error is not None:
            raise self.error
        self.clock.advance(self.read_s)
        return PullResult(1, self.read_s, self.read_s)

    @property
    def parts(self) -> list[Part]:
        return [part for part, _, _ in self.pulled]


@dataclass
class ScriptedFetcher:
    """Brings up what the test says that the host tier has."""

    pool: BlockPool
    num_blocks: int = 0

    def could_fetch(
        self, prefix: Prefix, sources: Sequence[PrefixSource], *, is_here: bool = False
    ) -> bool:
        return self.num_blocks > 0

    async def fetch(
        self, prefix: Prefix, sources: Sequence[PrefixSource], *, is_here: bool = False
    ) -> Fetched:
        assert is_here
        blocks = self.pool.allocate(self.num_blocks)
        for block_id, block_hash in zip(blocks, prefix.hashes, strict=False):
            self.pool.publish(block_id, block_hash)
        self.pool.release(blocks)
        return Fetched(from_tier=self.num_blocks * BLOCK)


TOKEN_ONE = TokenLogprobs(chosen=-0.5, top_ids=[7], top_logprobs=[-0.25])


class Bench:
    """An intake over a real engine that is not running, and one scripted session."""

    def __init__(
        self, host_id: str = HOST, state_blocks: int = 0, *, is_by_role: bool = False
    ) -> None:
        self.pool = BlockPool(
            NUM_BLOCKS,
            BLOCK,
            bump_generations=self._check_not_written,
            state_blocks=state_blocks,
        )
        self.clock = ManualClock()
        policy = decode_policy(16, 8)
        self.engine = Engine(Queues(self.pool, self.clock), policy, frozenset())
        self.puller = ScriptedPuller(self.clock)
        self.exporter = ScriptedExporter(self.clock, host_id)
        self.prefixes = ScriptedFetcher(self.pool)
        self.metrics = NodeMetrics()
        self.compiler = SlowCompiler()
        preparation = Preparation(self.prefixes, self.compiler, self.engine)
        self.room = RoomQueue(self.engine, policy)
        self.costs = PullCosts(PerfModel(), 16)
        self.pulls = AnnouncedPulls(self.puller, self.costs, self.clock, TIMEOUTS, HOST)
        self.scores = KeptScores()
        self.intake = Intake(
            self.engine,
            self.room,
            preparation,
            self.exporter,
            self.pulls,
            self.metrics,
            self.scores,
            is_by_role=is_by_role,
        )
        self.announce = self.exporter.announce

    def _check_not_written(self, block_ids: object) -> None:
        assert not self.puller.is_writing, "blocks were freed under a running pull"

    def take(
        self,
        request_id: str = "r",
        num_tokens: int = 10,
        sibling_of: str = "",
        grammar: str = "",
    ) -> asyncio.Task[None]:
        leg = DecodeLeg(
            request_id=request_id,
            prompt=Prompt(list(range(num_tokens))),
            sampling=SamplingParams(max_tokens=4, grammar=grammar),
            source=SOURCE,
            sibling_of=sibling_of,
        )
        request = self.intake.expected(leg, SOURCE)
        return asyncio.create_task(self.intake.take(request, leg.prompt_id, SOURCE))

    def record(
        self,
        request_id: str = "r",
        num_tokens: int = 10,
        output: tuple[int, ...] = (42,),
        ticket: bytes = b"",
        prefill_end_s: float = 0.0,
        made_s: float = 0.0,
        written_s: float = 0.0,
        head: HeadRow | None = None,
        state_ticket: bytes = b"",
        num_by_prefill: int | None = None,
    ) -> None:
        self.exporter.say(
            HandoffRecord(
                request_id=request_id,
                num_tokens=num_tokens,
                token_ids=list(output),
                logprobs=[TOKEN_ONE] * len(output),
                ticket=ticket,
                prefill_end_s=prefill_end_s,
                made_s=made_s,
                written_s=written_s,
                head=head,
                state_ticket=state_ticket,
                num_by_prefill=num_by_prefill,
            )
        )


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    check_ended(bench)


def check_ended(bench: Bench) -> None:
    """No block is lost, and nobody waits."""
    for request in list(bench.engine.queues.running):
        bench.engine.cancel(request.request_id)
    assert bench.pool.num_free == NUM_BLOCKS, "blocks were lost"
    assert len(bench.room) == 0
    bench.pool.check_integrity()


async def test_deadlines_of_pulls_follow_the_network(bench: Bench) -> None:
    """They are twice what pulls take, once that is more, also if that was too long for one."""
    bench.puller.gate.set()
    bench.puller.read_s = 20.0
    for request_id in ("a", "b"):
        taking = bench.take(request_id)
        await turn()
        bench.announce(0, 10, request_id=request_id)
        bench.record(request_id)
        await asyncio.wait_for(taking, 30)
    assert bench.puller.timeouts_s == [TIMEOUTS.transfer_s, pytest.approx(40.0, rel=0.05)]
    bench.puller.gate.clear()
    bench.puller.error = TransferTimeout("too long")
    taking = bench.take("c")
    await turn()
    bench.announce(0, 10, request_id="c")
    await turn()
    bench.clock.advance(100.0)
    bench.puller.gate.set()
    with pytest.raises(TransferTimeout):
        await asyncio.wait_for(taking, 30)
    assert bench.costs.deadline_s(bench.exporter.session.link.transport, 1, 5.0) > 60


async def test_chunks_are_pulled_as_they_come_and_the_request_adopted(bench: Bench) -> None:
    bench.scores.open("r", None, 0)  # it is claimable
    taking = bench.take()
    await turn()
    assert bench.pool.num_free == NUM_BLOCKS, "no room is taken before there is anything to pull"
    bench.announce(0, 8)
    await turn()
    assert bench.puller.parts == [(0, 8, 0, 4)]
    bench.announce(8, 10)
    row = HeadRow("h", np.float32([1.5, 2]).tobytes())
    bench.record(head=row)
    bench.puller.gate.set()
    await asyncio.wait_for(taking, 30)
    (request,) = bench.engine.queues.running
    assert request.tapped is not None
    assert (request.tapped.at(8), request.tapped.at(9)) == (None, row)
    assert bench.puller.parts == [(0, 8, 0, 4), (8, 10, 0, 4)]
    assert all(table == request.block_table for _, table, _ in bench.puller.pulled)
    assert request.output_token_ids == [42]
    assert bench.scores.of("r") == PromptLogprobs.of([TOKEN_ONE])
    assert request.num_computed_tokens == 10
    assert request.is_decoding
    assert request.lifecycle.phase_times().transfer_s == 0.5
    assert bench.exporter.settled == [True]
    (learned,) = bench.costs.transfers()
    assert learned.fixed_s + 1 / learned.bytes_per_s == pytest.approx(bench.puller.read_s, rel=0.1)


async def test_a_prefix_held_here_is_not_pulled_again(bench: Bench) -> None:
    bench.puller.gate.set()
    for request_id in ("a", "b"):
        taking = bench.take(request_id)
        await turn()
        bench.announce(0, 10, request_id=request_id)
        bench.record(request_id)
        await asyncio.wait_for(taking, 30)
    assert [from_token for _, _, from_token in bench.puller.pulled] == [0, 8]
    first, second = bench.engine.queues.running
    assert first.block_table[:2] == second.block_table[:2]


async def test_a_state_comes_with_the_record() -> None:
    bench = Bench(state_blocks=2)
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 10)
    bench.record(state_ticket=make_ticket(0, 2 * BLOCK))
    await asyncio.wait_for(taking, 30)
    (request,) = bench.engine.queues.running
    assert len(request.state_blocks) == 2
    part, table, _ = bench.puller.pulled[-1]
    assert (part[:2], table) == ((0, 2 * BLOCK), request.state_blocks)
    check_ended(bench)


@pytest.mark.parametrize("ticket", [b"", make_ticket(0, BLOCK)], ids=["none", "too short"])
async def test_a_state_of_another_size_is_refused(ticket: bytes) -> None:
    bench = Bench(state_blocks=2)
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 10)
    bench.record(state_ticket=ticket)
    with pytest.raises(MalformedMessage, match=r"takes 8 in blocks of 4.*engine\.block_size"):
        await asyncio.wait_for(taking, 30)
    check_ended(bench)


async def test_what_the_host_tier_has_is_not_pulled(bench: Bench) -> None:
    bench.prefixes.num_blocks = 2
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 10)
    bench.record()
    await asyncio.wait_for(taking, 30)
    assert [from_token for _, _, from_token in bench.puller.pulled] == [8]


async def test_without_room_the_kv_waits_where_it_is(bench: Bench) -> None:
    taken = bench.pool.allocate(6)
    taking = [bench.take("first"), bench.take("second", num_tokens=3)]
    await turn()
    bench.announce(0, 10, request_id="first")
    await turn()
    bench.announce(0, 3, request_id="second")
    await turn()
    assert len(bench.room) == 2  # the second would fit, but it is not its turn
    assert bench.puller.pulled == []
    bench.pool.release(taken)
    await turn()
    assert set(bench.puller.parts) == {(0, 10, 0, 4), (0, 3, 0, 4)}
    for task in taking:
        task.cancel()
    await asyncio.gather(*taking, return_exceptions=True)


@pytest.mark.parametrize("stage", ["before", "waiting", "pulling"])
async def test_a_cancel_leaves_nothing_behind(bench: Bench, stage: str) -> None:
    blocked = bench.pool.allocate(NUM_BLOCKS) if stage == "waiting" else []
    taking = bench.take()
    await turn()
    if stage != "before":
        bench.announce(0, 10)
        await turn()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert bench.exporter.settled == [False]
    bench.pool.release(blocked)


@pytest.mark.parametrize("stage", ["before", "waiting", "pulling"])
async def test_losing_the_exporter_ends_the_intake(bench: Bench, stage: str) -> None:
    blocked = bench.pool.allocate(NUM_BLOCKS) if stage == "waiting" else []
    taking = bench.take()
    await turn()
    if stage != "before":
        bench.announce(0, 10)
        await turn()
    bench.exporter.session.lose(PeerLost("p is gone"))
    bench.puller.gate.set()
    with pytest.raises(PeerLost, match="p is gone"):
        await asyncio.wait_for(taking, 30)
    bench.pool.release(blocked)


async def test_a_grammar_is_compiled_during_the_prefill_and_there_before_room_is_taken(
    bench: Bench,
) -> None:
    slow = bench.compiler
    bench.puller.gate.set()
    taking = bench.take(grammar="start: /a/")
    await turn()
    assert slow.is_compiling, "the prefill has announced nothing yet"
    bench.announce(0, 10)
    bench.record()
    await turn()
    assert bench.puller.pulled == []
    assert bench.pool.num_free == NUM_BLOCKS
    slow.gate.set()
    await asyncio.wait_for(taking, 30)
    (request,) = bench.engine.queues.running
    assert request.grammar is slow.grammar
    assert bench.exporter.settled == [True]


async def test_requests_without_a_grammar_find_room_while_others_wait_for_theirs(
    bench: Bench,
) -> None:
    slow = bench.compiler
    bench.puller.gate.set()
    slow_names = ["a", "b", "c"]  # their prompts would fill the pool
    waiting = [bench.take(name, grammar="start: /a/") for name in slow_names]
    await turn()
    for name in slow_names:
        bench.announce(0, 10, request_id=name)
        bench.record(name)
    plain = bench.take("plain")
    await turn()
    bench.announce(0, 10, request_id="plain")
    bench.record("plain")
    await asyncio.wait_for(plain, 30)
    assert [request.request_id for request in bench.engine.queues.running] == ["plain"]
    bench.engine.cancel("plain")
    slow.error = GrammarFailed("too large")
    slow.gate.set()
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(failure, GrammarFailed) for failure in failures)


async def test_a_grammar_that_fails_ends_the_intake(bench: Bench) -> None:
    slow = bench.compiler
    slow.error = GrammarFailed("too large")
    slow.gate.set()
    taking = bench.take(grammar="start: /a/")
    await turn()
    bench.announce(0, 10)
    with pytest.raises(GrammarFailed, match="too large"):
        await asyncio.wait_for(taking, 30)
    assert bench.puller.pulled == []
    assert bench.exporter.settled == [False]


@pytest.mark.parametrize("is_announced", [False, True])
async def test_the_end_of_the_handoff_ends_the_compiling(bench: Bench, is_announced: bool) -> None:
    slow = bench.compiler
    taking = bench.take(grammar="start: /a/")
    await turn()
    if is_announced:
        bench.announce(0, 10)
        await turn()
    assert slow.is_compiling
    bench.exporter.say(HandoffEnded(request_id="r", code=PeerLost.code, message="p is gone"))
    with pytest.raises(PeerLost):
        await asyncio.wait_for(taking, 30)
    assert not slow.is_compiling


async def test_a_handoff_has_its_subscriber_while_a_grammar_waits_for_its_turn(
    bench: Bench,
) -> None:
    """Without one its lease runs, which is for decode nodes that never come."""
    taking = bench.take(grammar="start: /a/")
    await turn()
    (subscribed,) = bench.exporter.outbox.sent
    assert isinstance(subscribed, Subscribe)
    bench.compiler.error = GrammarFailed("too large")
    bench.compiler.gate.set()
    bench.announce(0, 10)
    with pytest.raises(GrammarFailed):
        await asyncio.wait_for(taking, 30)
    assert bench.exporter.settled == [False]


async def test_a_stale_ticket_ends_the_intake(bench: Bench) -> None:
    bench.puller.error = StaleTicket("block 3 changed hands")
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 10)
    with pytest.raises(StaleTicket):
        await asyncio.wait_for(taking, 30)
    assert bench.exporter.settled == [False]


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize(
    ("end", "grammar"),
    [
        *((end, grammar) for end in ("adopted", "ended", "cancelled") for grammar in ("", "a")),
        ("grammar failed", "a"),
    ],
)
async def test_a_handoff_leaves_no_cycle_behind(bench: Bench, end: str, grammar: str) -> None:
    """What it leaves is freed with its last reference, not by the garbage collector."""
    slow = bench.compiler
    bench.puller.gate.set()
    match end:
        case "adopted":
            slow.gate.set()
        case "grammar failed":
            slow.error = GrammarFailed("too large")
            slow.gate.set()
    for _ in range(10):
        taking = bench.take(grammar=grammar)
        await turn()
        match end:
            case "adopted":
                bench.announce(0, 10)
                bench.record()
            case "ended":
                code = RequestEnded.code
                bench.exporter.say(HandoffEnded(request_id="r", code=code, message="so soon"))
            case "cancelled":
                taking.cancel()
            case "grammar failed":
                bench.announce(0, 10)
        await asyncio.wait({taking})
        is_known_end = RequestEnded | GrammarFailed | None
        assert taking.cancelled() or isinstance(taking.exception(), is_known_end)
        bench.engine.cancel("r")
        del taking
    assert gc.collect() < 10


async def test_an_ended_handoff_ends_the_intake(bench: Bench) -> None:
    taking = bench.take()
    await turn()
    bench.exporter.say(
        HandoffEnded(request_id="r", code=RequestCancelled.code, message="cancelled")
    )
    with pytest.raises(RequestCancelled):
        await asyncio.wait_for(taking, 30)


async def test_a_gap_between_tickets_is_refused(bench: Bench) -> None:
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 4)
    bench.announce(8, 10)
    with pytest.raises(MalformedMessage, match=r"after 4 tokens .* came KV of tokens 8\.\.10"):
        await asyncio.wait_for(taking, 30)


async def test_a_handoff_that_ends_is_heard_while_waiting_for_room(bench: Bench) -> None:
    blocked = bench.pool.allocate(NUM_BLOCKS)
    taking = bench.take()
    await turn()
    bench.announce(0, 10)
    await turn()
    assert len(bench.room) == 1
    bench.exporter.say(
        HandoffEnded(request_id="r", code=RequestCancelled.code, message="cancelled")
    )
    with pytest.raises(RequestCancelled):
        await asyncio.wait_for(taking, 30)
    bench.pool.release(blocked)


async def test_a_record_that_contradicts_the_leg_is_refused(bench: Bench) -> None:
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 9)
    bench.record(num_tokens=9)
    with pytest.raises(MalformedMessage, match="handed off with 9 tokens"):
        await asyncio.wait_for(taking, 30)


@pytest.mark.parametrize("output", [(), (42, 43)])
async def test_a_record_without_exactly_token_one_is_refused(
    bench: Bench, output: tuple[int, ...]
) -> None:
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 10)
    bench.record(output=output)
    with pytest.raises(MalformedMessage, match=f"and {len(output)} that are not known"):
        await asyncio.wait_for(taking, 30)


# ---- layer by layer ----------------------------------------------------------------------------


async def test_layers_are_pulled_as_they_come(bench: Bench) -> None:
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 8, 0, 1)
    await turn()
    bench.announce(0, 8, 1, 4)
    bench.announce(8, 10, 0, 2)
    bench.record(ticket=make_ticket(8, 10, 2, 4))
    await asyncio.wait_for(taking, 30)
    assert bench.puller.parts == [(0, 8, 0, 1), (0, 8, 1, 4), (8, 10, 0, 2), (8, 10, 2, 4)]
    assert [from_token for _, _, from_token in bench.puller.pulled] == [0, 0, 8, 8]


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 8, 1, 4)],  # not from the first layer on
        [(0, 8, 0, 1), (0, 8, 2, 4)],  # a layer is missing
        [(0, 8, 0, 2), (0, 8, 1, 4)],  # one comes twice
        [(0, 8, 0, 2), (8, 10, 0, 4)],  # the chunk's other layers are missing
        [(0, 8, 0, 2), (0, 10, 2, 4)],  # they are for more than the chunk
        [(0, 12, 0, 4)],  # beyond the prompt
    ],
)
async def test_what_does_not_follow_is_refused(bench: Bench, parts: list[Part]) -> None:
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    for part in parts:
        bench.announce(*part)
    with pytest.raises(MalformedMessage):
        await asyncio.wait_for(taking, 30)


async def test_a_record_before_the_last_layers_is_refused(bench: Bench) -> None:
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 10, 0, 3)
    bench.record()
    with pytest.raises(MalformedMessage, match="announced up to token 0"):
        await asyncio.wait_for(taking, 30)


async def test_a_small_prompt_comes_in_one_message(bench: Bench) -> None:
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.record(ticket=make_ticket(0, 10))
    await asyncio.wait_for(taking, 30)
    assert bench.puller.parts == [(0, 10, 0, 4)]


# ---- renewal -----------------------------------------------------------------------------------


async def test_tickets_that_grew_old_while_waiting_for_room_are_renewed(bench: Bench) -> None:
    bench.puller.gate.set()
    blocked = bench.pool.allocate(NUM_BLOCKS)
    taking = bench.take()
    await turn()
    bench.announce(0, 4)
    bench.announce(4, 8, 0, 2)
    await turn()
    bench.clock.advance(TIMEOUTS.ticket_s)
    bench.pool.release(blocked)
    await turn()
    assert bench.exporter.num_renewals == 1
    assert bench.puller.pulled == [], "nothing is pulled with an old ticket"
    bench.announce(4, 8, 2, 4)  # said before the exporter heard of it
    bench.announce(0, 8, is_restart=True)
    bench.record(ticket=make_ticket(8, 10))
    await asyncio.wait_for(taking, 30)
    assert bench.puller.parts == [(0, 8, 0, 4), (8, 10, 0, 4)]


REFUSED = [TicketInvalid("no blocks"), StaleIncarnation("of incarnation 'x'")]


@pytest.mark.parametrize("error", REFUSED)
async def test_a_ticket_that_was_damaged_on_the_way_is_renewed(
    bench: Bench, error: PdserveError
) -> None:
    bench.puller.error = error
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 10)
    await turn()
    assert bench.exporter.num_renewals == 1
    bench.puller.error = None
    bench.announce(0, 10, is_restart=True)
    bench.record()
    await asyncio.wait_for(taking, 30)
    assert bench.puller.parts == [(0, 10, 0, 4)] * 2


async def test_a_ticket_of_a_state_that_was_damaged_or_grew_old_is_renewed() -> None:
    bench = Bench(state_blocks=2)
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 10)
    await turn()
    state_ticket = make_ticket(0, 2 * BLOCK)
    bench.record(state_ticket=b"no ticket")
    await turn()
    assert bench.exporter.num_renewals == 1
    bench.announce(0, 10, is_restart=True)
    bench.puller.read_s = TIMEOUTS.ticket_s  # the record gets old behind it
    bench.record(state_ticket=state_ticket)
    await turn()
    assert bench.exporter.num_renewals == 2
    bench.puller.read_s = 0.25
    bench.announce(0, 10, is_restart=True)
    bench.record(state_ticket=state_ticket)
    await asyncio.wait_for(taking, 30)
    (request,) = bench.engine.queues.running
    assert bench.puller.pulled[-1][1] == request.state_blocks
    check_ended(bench)


@pytest.mark.parametrize("error", REFUSED)
async def test_a_ticket_that_is_refused_twice_ends_the_intake(
    bench: Bench, error: PdserveError
) -> None:
    bench.puller.error = error
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 10)
    await turn()
    bench.announce(0, 10, is_restart=True)
    with pytest.raises(type(error)):
        await asyncio.wait_for(taking, 30)
    assert bench.exporter.num_renewals == 1


async def test_what_was_pulled_already_is_not_pulled_again_after_a_renewal(bench: Bench) -> None:
    bench.puller.gate.set()
    bench.puller.read_s = TIMEOUTS.ticket_s  # the next ticket gets old in the queue
    taking = bench.take()
    await turn()
    bench.announce(0, 5)
    bench.announce(5, 10)
    await turn()
    assert bench.exporter.num_renewals == 1
    bench.announce(0, 10, is_restart=True)
    bench.record()
    await asyncio.wait_for(taking, 30)
    assert [from_token for _, _, from_token in bench.puller.pulled] == [0, 5]


# ---- how long it took --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host_id", "handoff_s", "room_s", "there_s"),
    [
        (HOST, 7.5, 2.0, (0.25, 0.125, 0.625)),  # from the prefill's end on
        ("another", 6.5, 1.0, (0, 0, 0)),  # from the record's arrival on: clocks are not the same
    ],
)
async def test_a_handoff_is_the_sum_of_its_parts(
    host_id: str, handoff_s: float, room_s: float, there_s: tuple[float, ...]
) -> None:
    bench = Bench(host_id)
    blocked = bench.pool.allocate(NUM_BLOCKS)
    bench.clock.advance(9.0)
    taking = bench.take()
    await turn()
    bench.announce(0, 8)
    await turn()
    bench.clock.advance(2.0)
    bench.record(ticket=make_ticket(8, 10), prefill_end_s=10.0, made_s=10.25, written_s=10.375)
    bench.clock.advance(1.0)
    bench.pool.release(blocked)
    await turn()
    bench.clock.advance(3.0)  # for whatever else there is
    bench.puller.read_s = 1.0
    bench.puller.gate.set()
    await asyncio.wait_for(taking, 30)
    (request,) = bench.engine.queues.running
    request.lifecycle.joined_s = bench.clock.now() + 0.5
    times = request.lifecycle.phase_times()
    assert times.handoff_s == handoff_s
    assert times.handoff_room_s == room_s
    assert times.handoff_copy_s == times.transfer_s == 2.0
    assert times.handoff_step_s == 0.5
    assert times.handoff_hops is not None
    hops_s = astuple(times.handoff_hops)
    assert hops_s == (*there_s, 5.0, 1.0, 0.0)
    assert sum(hops_s) + times.handoff_step_s == handoff_s
    assert "pdserve_room_wait_seconds_sum 3.0" in bench.metrics.exposition().decode()
    check_ended(bench)


async def test_a_record_without_times_was_all_the_time_on_its_way(bench: Bench) -> None:
    bench.puller.gate.set()
    bench.clock.advance(3.0)
    taking = bench.take()
    await turn()
    bench.record(ticket=make_ticket(0, 10), prefill_end_s=1.0)  # of an exporter of another build
    await asyncio.wait_for(taking, 30)
    (request,) = bench.engine.queues.running
    hops = request.lifecycle.phase_times().handoff_hops
    assert hops is not None
    assert astuple(hops)[:3] == (0.0, 0.0, 2.0)


async def test_copies_during_the_prefill_are_no_part_of_the_handoff(bench: Bench) -> None:
    bench.puller.read_s = 1.0
    bench.puller.gate.set()
    taking = bench.take()
    await turn()
    bench.announce(0, 8)
    await turn()
    bench.clock.advance(2.0)
    bench.record(ticket=make_ticket(8, 10), prefill_end_s=0.75)
    await asyncio.wait_for(taking, 30)
    (request,) = bench.engine.queues.running
    request.lifecycle.joined_s = bench.clock.now()
    times = request.lifecycle.phase_times()
    assert times.transfer_s == 2.0
    assert times.handoff_copy_s == 1.25
    assert times.handoff_s == 3.25


async def test_of_a_stream_that_goes_on_only_its_prompt_is_looked_for_here(bench: Bench) -> None:
    bench.puller.gate.set()
    taking = bench.take("whole", 12)
    await turn()
    bench.announce(0, 12, request_id="whole")
    bench.record("whole", 12)
    await asyncio.wait_for(taking, 30)
    leg = DecodeLeg(
        request_id="r",
        prompt=Prompt(list(range(6))),
        sampling=SamplingParams(max_tokens=8),
        source=SOURCE,
        output_token_ids=list(range(6, 12)),
    )
    request = bench.intake.expected(leg, SOURCE)
    taking = asyncio.create_task(bench.intake.take(request, leg.prompt_id, SOURCE))
    await turn()
    bench.announce(0, 6)
    bench.record(num_tokens=6, output=(6,))
    await asyncio.wait_for(taking, 30)
    assert bench.puller.pulled[-1][0] == (0, 6, 0, 4)
    assert request.num_computed_tokens == 6
