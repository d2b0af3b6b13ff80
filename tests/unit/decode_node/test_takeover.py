"""Streams that are taken over while they run elsewhere: the node that they come to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.protocol import (
    Announcement,
    DecodeLeg,
    HandoffEnded,
    Prompt,
    PromptLogprobs,
    SamplingParams,
    Subscribe,
    TakeOver,
)
from pdserve.shared.errors import MalformedMessage, OutOfBlocks, PeerLost
from tests.fakes.exporter import SOURCE, make_ticket
from tests.unit.decode_node.test_intake import NUM_BLOCKS, TOKEN_ONE, Bench, check_ended
from tests.waits import turn

KNOWN = [70, 71]  # output, after a prompt of 10 tokens


class Taker(Bench):
    """An intake that takes the stream `s` over, as the leg `s~1`."""

    def begin(self, num_prompt: int = 10, max_tokens: int = 20) -> asyncio.Task[None]:
        leg = DecodeLeg(
            request_id="s~1",
            prompt=Prompt(list(range(num_prompt))),
            sampling=SamplingParams(max_tokens=max_tokens),
            source=SOURCE,
            output_token_ids=KNOWN,
            takes_over="s",
        )
        request = self.intake.expected(leg, SOURCE)
        return asyncio.create_task(self.intake.take(request, leg.prompt_id, SOURCE, leg.takes_over))

    def completed(self, first: int, end: int) -> None:
        """Say that these tokens can be pulled, and that there is no more so far."""
        self.announce(first, end, request_id="s")
        self.say_all()

    def say_all(self) -> None:
        self.exporter.say(Announcement(request_id="s", ticket=b""))

    @property
    def num_asked(self) -> int:
        """How often the stream was asked to end there."""
        return sum(isinstance(message, TakeOver) for message in self.exporter.outbox.sent)


@pytest.fixture
async def taker() -> AsyncIterator[Taker]:
    taker = Taker()
    yield taker
    check_ended(taker)


async def test_it_is_asked_to_end_there_when_what_it_has_completed_is_here(taker: Taker) -> None:
    taker.scores.open("s~1", PromptLogprobs.of([TOKEN_ONE] * 2), 2)
    taking = taker.begin()
    await turn()
    (subscribe,) = taker.exporter.outbox.sent
    assert isinstance(subscribe, Subscribe)
    assert (subscribe.request_id, subscribe.num_emitted, subscribe.taker) == ("s", 2, "s~1")
    taker.completed(0, 8)
    await turn()
    assert taker.puller.parts == [(0, 8, 0, 4)]
    assert taker.num_asked == 0
    taker.puller.gate.set()
    await turn()
    assert taker.num_asked == 1
    taker.record("s", 13, output=(72, 73), ticket=make_ticket(8, 13), prefill_end_s=0.1)
    await asyncio.wait_for(taking, 30)
    (request,) = taker.engine.queues.running
    assert request.request_id == "s~1"
    assert request.output_token_ids == [*KNOWN, 72, 73]
    assert request.is_decoding, "nothing is left to compute but its next token"
    assert request.num_emitted_before == 2
    assert taker.puller.parts == [(0, 8, 0, 4), (8, 13, 0, 4)]
    assert taker.exporter.settled == [True]
    assert taker.scores.of("s~1") == PromptLogprobs.of([TOKEN_ONE] * 4)


async def test_what_it_completes_meanwhile_is_pulled_before_it_ends(taker: Taker) -> None:
    """It grows beyond the room that it had at first."""
    taker.puller.gate.set()
    taking = taker.begin()
    await turn()
    taker.say_all()
    await turn()
    assert taker.puller.parts == [], "nothing is complete"
    taker.completed(0, 20)
    await turn()
    assert taker.num_asked == 2
    taker.record("s", 24, output=tuple(range(13)), ticket=make_ticket(20, 24))
    await asyncio.wait_for(taking, 30)
    (request,) = taker.engine.queues.running
    assert len(request.block_table) == 6
    assert request.num_computed_tokens == 24
    assert request.is_decoding


async def test_it_may_have_grown_beyond_what_there_is(taker: Taker) -> None:
    taker.puller.gate.set()
    taken = taker.pool.allocate(NUM_BLOCKS - 5)
    taking = taker.begin()
    await turn()
    taker.completed(0, 24)
    with pytest.raises(OutOfBlocks):
        await asyncio.wait_for(taking, 30)
    assert taker.exporter.settled == [False]
    taker.pool.release(taken)


async def test_tickets_that_are_renewed_after_its_end(taker: Taker) -> None:
    """All of it is announced again, and its record comes without a ticket."""
    taker.puller.gate.set()
    taking = taker.begin()
    await turn()
    taker.completed(0, 8)
    await turn()
    taker.announce(0, 13, request_id="s", is_restart=True)
    taker.record("s", 13, output=(72, 73))
    await asyncio.wait_for(taking, 30)
    (request,) = taker.engine.queues.running
    assert request.is_decoding
    assert request.num_computed_tokens == 13


@pytest.mark.parametrize(
    ("num_tokens", "output"),
    [(13, (72,)), (12, (72, 73)), (11, ()), (32, tuple(range(21)))],
    ids=["a token is missing", "one too many", "nothing new", "more than it may have"],
)
async def test_a_record_that_contradicts_what_is_known(
    taker: Taker, num_tokens: int, output: tuple[int, ...]
) -> None:
    taker.puller.gate.set()
    taking = taker.begin()
    await turn()
    taker.completed(0, 8)
    taker.record("s", num_tokens, output=output, ticket=make_ticket(8, num_tokens))
    with pytest.raises(MalformedMessage, match=f"{num_tokens} tokens and {len(output)} that"):
        await asyncio.wait_for(taking, 30)
    assert taker.exporter.settled == [False]


@pytest.mark.parametrize("when", ["before room is there", "while it is pulled", "after its end"])
async def test_a_stream_that_cannot_be_taken_over(taker: Taker, when: str) -> None:
    taken = taker.pool.allocate(NUM_BLOCKS) if when == "before room is there" else []
    taking = taker.begin()
    await turn()
    taker.completed(0, 8)
    await turn()
    if when == "after its end":
        taker.puller.gate.set()
        await turn()
        assert taker.num_asked == 1
    ended = HandoffEnded(request_id="s", code=PeerLost.code, message="it was preempted")
    taker.exporter.say(ended)
    taker.puller.gate.set()
    with pytest.raises(PeerLost):
        await asyncio.wait_for(taking, 30)
    assert taker.exporter.settled == [False]
    taker.pool.release(taken)
