"""Streams that other nodes take over while they run here: the node that they leave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import pytest_asyncio

from kv_transfer.ticket import read_ticket
from pdserve.engine.interface import StepReport, shape_of
from pdserve.engine.request import Request
from pdserve.protocol import (
    Announcement,
    Claim,
    Claimed,
    DecodeLeg,
    FinishReason,
    HandoffEnded,
    HandoffRecord,
    NodeRole,
    Prompt,
    SamplingParams,
    TokenBatch,
    TokenEvent,
)
from pdserve.shared.errors import PeerLost, RequestCancelled, RequestEnded
from tests.unit.node.one_node import Bench, Link, scores_of, token_of

NUM_PROMPT, MAX_TOKENS = 9, 12


class Source(Bench):
    """A node with one stream, and another node that listens."""

    def __init__(self) -> None:
        super().__init__(NodeRole.DECODE)
        self.heard: list[msgspec.Struct] = []
        self.taker = self.heard.append  # the same one at each look

    def stream(self, num_tokens: int, **fields: object) -> None:
        """It has so much output."""
        sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        leg = DecodeLeg(request_id="r", prompt=Prompt(list(range(NUM_PROMPT))), sampling=sampling)
        self.services.start_decode(msgspec.structs.replace(leg, **fields), self.link)
        self.run_until_tokens("r", num_tokens)

    def subscribe(self, num_emitted: int, request_id: str = "r", leg: str = "r~1") -> None:
        self.services.announcer.subscribe_to_stream(request_id, self.taker, num_emitted, leg)

    def take_over(self) -> None:
        self.services.announcer.take_over("r", self.taker)

    def settle(self, *, was_pulled: bool) -> None:
        self.services.announcer.settle("r", self.taker, was_pulled=was_pulled)

    @property
    def request(self) -> Request:
        request = self.services.engine.find("r")
        assert request is not None
        return request

    @property
    def heard_parts(self) -> list[tuple[int, int]]:
        """(first token, end) of each ticket that was heard."""
        said = [m for m in self.heard if isinstance(m, Announcement | HandoffRecord) and m.ticket]
        tickets = [read_ticket(message.ticket) for message in said]
        return [(ticket.first_token, ticket.end_token) for ticket in tickets]

    @property
    def events(self) -> list[TokenEvent]:
        """What the coordinator has heard of it."""
        batches = [message for message in self.link.sent if isinstance(message, TokenBatch)]
        return [event for batch in batches for event in batch.each()]

    @property
    def last(self) -> msgspec.Struct:
        return self.heard[-1]


@pytest_asyncio.fixture
async def source() -> AsyncIterator[Source]:
    source = Source()
    yield source
    source.check_idle()
    await source.close()


async def test_it_goes_on_while_its_blocks_are_pulled_and_ends_with_its_next_token(
    source: Source,
) -> None:
    source.stream(2)
    source.subscribe(2)
    assert source.heard_parts == [(0, 8)], "what is complete"
    assert source.last == Announcement(request_id="r", ticket=b"")
    source.step()
    assert source.last == Announcement(request_id="r", ticket=b""), "nobody has asked for the rest"
    assert [event.is_taken_over for event in source.events] == [False] * 3
    source.take_over()
    source.step()
    record = source.last
    assert isinstance(record, HandoffRecord)
    assert source.heard_parts == [(0, 8), (8, NUM_PROMPT + 3)]
    tokens = source.link.tokens_of("r")
    assert (record.num_tokens, record.token_ids) == (NUM_PROMPT + 3, tokens[2:])
    *others, last = source.events
    assert (last.index, last.is_taken_over, last.finish_reason) == (3, True, None)
    assert not any(event.is_taken_over for event in others)
    assert source.step() == [], "it is not planned any more"
    assert "r" in source.services.legs, "a drain waits until it is pulled"
    source.settle(was_pulled=True)


async def test_a_step_may_be_reported_when_it_is_already_asked_to_end(source: Source) -> None:
    """Reports are deferred into the next step."""
    source.stream(2)
    source.subscribe(2)
    engine = source.parts.engine
    rows = engine.begin_step()
    sampled = [token_of(row.request) for row in rows]
    shape = shape_of(rows)
    engine.end_step(rows, sampled, 0.0)
    source.take_over()
    source.services.step_done(StepReport(rows, sampled, 0.0, 0.001, 0.0, shape))
    assert not source.events[-1].is_taken_over
    source.step()
    assert [event.is_taken_over for event in source.events] == [False, False, False, True]
    assert [event.times is None for event in source.events[1:]] == [True, True, False]
    source.settle(was_pulled=True)


async def test_what_it_has_completed_meanwhile_is_announced_first(source: Source) -> None:
    source.stream(3)
    source.subscribe(3)
    source.run_until_tokens("r", 6)
    source.take_over()
    assert source.heard_parts == [(0, 8), (8, 12)]
    assert source.last == Announcement(request_id="r", ticket=b"")
    source.step()
    assert not isinstance(source.last, HandoffRecord)
    source.take_over()
    source.step()
    assert isinstance(source.last, HandoffRecord)
    source.settle(was_pulled=True)


async def test_tickets_are_renewed_before_and_after_its_end(source: Source) -> None:
    source.stream(2)
    source.subscribe(2)
    source.services.announcer.renew("r", source.taker)
    assert source.heard_parts == [(0, 8), (0, 8)]
    assert source.last == Announcement(request_id="r", ticket=b"")
    source.take_over()
    source.step()
    source.services.announcer.renew("r", source.taker)
    assert source.heard_parts[2:] == [(8, 11), (0, 11)]
    assert isinstance(source.last, HandoffRecord)
    source.settle(was_pulled=True)


@pytest.mark.parametrize("when", ["before it is asked for the rest", "afterwards"])
@pytest.mark.parametrize("how", ["gives up", "is lost"])
async def test_it_goes_on_here_if_its_taker_leaves(source: Source, when: str, how: str) -> None:
    source.stream(2)
    source.subscribe(2)
    if when == "afterwards":
        source.take_over()
    if how == "gives up":
        source.settle(was_pulled=False)
    else:
        source.services.announcer.unsubscribe("r", source.taker)
    source.run()
    assert len(source.link.tokens_of("r")) == MAX_TOKENS
    assert source.events[-1].finish_reason is FinishReason.LENGTH
    assert not any(event.is_taken_over for event in source.events)


@pytest.mark.parametrize("how", ["gives up", "is lost"])
async def test_its_blocks_are_free_if_its_taker_leaves_after_its_end(
    source: Source, how: str
) -> None:
    """The coordinator has been told of the end, and looks after the stream."""
    source.stream(2)
    source.subscribe(2)
    source.take_over()
    source.step()
    if how == "gives up":
        source.settle(was_pulled=False)
    else:
        source.services.announcer.unsubscribe("r", source.taker)
    assert source.events[-1].is_taken_over


@pytest.mark.parametrize("is_asked", [False, True])
async def test_its_taker_hears_that_it_has_ended_by_itself(source: Source, is_asked: bool) -> None:
    source.stream(MAX_TOKENS - 1)
    source.subscribe(2)
    if is_asked:
        source.take_over()
        assert source.heard_parts[-1][1] == 16, "further blocks"
        source.take_over()
    source.run()
    ended = source.last
    assert isinstance(ended, HandoffEnded)
    assert ended.code == RequestEnded.code
    assert source.events[-1].finish_reason is FinishReason.LENGTH
    assert not source.events[-1].is_taken_over
    source.settle(was_pulled=False)


async def test_its_taker_hears_that_it_was_cancelled(source: Source) -> None:
    source.stream(2)
    source.subscribe(2)
    source.take_over()
    source.services.cancel_leg("r", "gone")
    ended = source.last
    assert isinstance(ended, HandoffEnded)
    assert ended.code == RequestCancelled.code
    source.settle(was_pulled=False)


async def test_one_that_is_preempted_stays(source: Source) -> None:
    source.stream(2)
    source.subscribe(2)
    source.services.engine.queues.preempt(source.request)
    source.take_over()
    ended = source.last
    assert isinstance(ended, HandoffEnded)
    assert ended.code == PeerLost.code, "no failed step, which would be held against the request"
    source.run()
    assert len(source.link.tokens_of("r")) == MAX_TOKENS


@pytest.mark.parametrize(
    "ask",
    [
        lambda source: source.subscribe(2, "unknown"),
        lambda source: source.subscribe(4),
        lambda source: source.subscribe(-1),
    ],
    ids=["is not here", "knows more than there is", "knows nothing"],
)
async def test_what_cannot_be_taken_over_is_refused(
    source: Source, ask: Callable[[Source], object]
) -> None:
    source.stream(3)
    ask(source)
    (ended,) = source.heard
    assert isinstance(ended, HandoffEnded)
    assert ended.code == PeerLost.code
    source.run()
    assert len(source.link.tokens_of("r")) == MAX_TOKENS
    source.settle(was_pulled=False)


@pytest.mark.parametrize("leg", ["r~2", ""], ids=["named", "of an older build"])
@pytest.mark.parametrize("is_asked", [False, True])
async def test_another_node_takes_it_over_before_the_first_has_settled(
    source: Source, is_asked: bool, leg: str
) -> None:
    """The first one was told to give it up, and is ending a pull."""
    source.stream(2)
    source.subscribe(2)
    if is_asked:
        source.take_over()
    first, heard_by_first = source.taker, source.heard
    source.heard = []
    source.taker = source.heard.append
    source.subscribe(2, leg=leg)
    ended = heard_by_first[-1]
    assert isinstance(ended, HandoffEnded)
    assert ended.code == PeerLost.code
    assert source.last == Announcement(request_id="r", ticket=b"")
    source.step()
    assert not source.events[-1].is_taken_over, "the second one has not asked for the rest"
    source.services.announcer.take_over("r", first)
    source.services.announcer.settle("r", first, was_pulled=False)
    source.take_over()
    source.step()
    assert source.events[-1].is_taken_over
    assert isinstance(source.last, HandoffRecord)
    assert source.heard_parts == [(0, 8), (8, NUM_PROMPT + 3)]
    source.settle(was_pulled=True)


async def test_one_that_was_replaced_may_subscribe_late(source: Source) -> None:
    """It has not heard yet that it is to give the stream up."""
    source.stream(2)
    source.subscribe(2, leg="r~10")
    late: list[msgspec.Struct] = []
    source.services.announcer.subscribe_to_stream("r", late.append, 2, "r~9")
    (ended,) = late
    assert isinstance(ended, HandoffEnded)
    assert (ended.code, ended.message) == (
        PeerLost.code,
        "r~10 is to take it over instead of r~9",
    )
    source.services.announcer.take_over("r", late.append)
    source.services.announcer.settle("r", late.append, was_pulled=False)
    source.step()
    assert not source.events[-1].is_taken_over, "the later one has not asked for the rest"
    source.take_over()
    source.step()
    assert source.events[-1].is_taken_over
    assert isinstance(source.last, HandoffRecord)
    source.settle(was_pulled=True)


async def test_it_has_ended_for_the_first_when_another_node_is_to_take_it_over(
    source: Source,
) -> None:
    """It resumes, and its failure is none of the request's."""
    source.stream(2)
    source.subscribe(2)
    source.take_over()
    source.step()
    heard: list[msgspec.Struct] = []
    source.services.announcer.subscribe_to_stream("r", heard.append, 2, "r~2")
    (ended,) = heard
    assert isinstance(ended, HandoffEnded)
    assert ended.code == PeerLost.code
    assert isinstance(source.last, HandoffRecord), "the first one can still pull it"
    source.settle(was_pulled=True)


async def test_its_kept_log_probabilities_come_with_the_record(source: Source) -> None:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
    source.stream(3, sampling=sampling, is_claimable=True)
    source.subscribe(2)
    source.take_over()
    request = source.request
    source.step()
    record = source.last
    assert isinstance(record, HandoffRecord)
    assert record.logprobs == [scores_of(request, token) for token in record.token_ids]
    assert len(record.logprobs) == 2
    source.settle(was_pulled=True)


@pytest.mark.parametrize("is_known", [True, False], ids=["lost", "not yet known to be lost"])
async def test_one_that_has_ended_here_can_be_claimed_until_its_taker_has_it(
    source: Source, is_known: bool
) -> None:
    source.stream(2, is_claimable=True)
    source.subscribe(2)
    source.take_over()
    source.step()
    assert isinstance(source.last, HandoffRecord)
    if is_known:
        source.services.coordinator_lost(source.link)
    other = Link([])
    tokens = source.link.tokens_of("r")
    source.services.claim(Claim(request_id="r"), other)
    assert other.sent == [Claimed(request_id="r", token_ids=tokens)]
    ended = source.last
    assert isinstance(ended, HandoffEnded)
    assert ended.code == RequestCancelled.code
    source.settle(was_pulled=False)


async def test_one_without_a_coordinator_that_is_taken_over_is_still_known_here(
    source: Source,
) -> None:
    """Its taker has more of it, but may be lost, too."""
    source.stream(2, is_claimable=True)
    source.subscribe(2)
    source.services.coordinator_lost(source.link)
    tokens = source.request.output_token_ids
    source.take_over()
    source.step()
    assert isinstance(source.last, HandoffRecord)
    source.settle(was_pulled=True)
    other = Link([])
    source.services.claim(Claim(request_id="r"), other)
    assert other.sent == [Claimed(request_id="r", token_ids=tokens)]


async def test_the_engine_is_woken_to_end_a_stream(source: Source) -> None:
    source.stream(2)
    source.subscribe(2)
    engine = source.parts.engine
    engine._wake.clear()
    source.take_over()
    assert engine._wake.is_set()
    source.step()
    source.settle(was_pulled=True)


async def test_who_has_not_subscribed_cannot_take_it_over(source: Source) -> None:
    source.stream(2)
    source.take_over()
    source.run()
    assert source.heard == []
    assert len(source.link.tokens_of("r")) == MAX_TOKENS
