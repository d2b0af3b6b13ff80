"""Several answers to one prompt: who gets which leg, when, and what the end of one means."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from coordinator.generation import GenerationRequest
from coordinator.requests.running import RunningRequest
from pdserve.protocol import (
    CancelLeg,
    DecodeLeg,
    LegFailed,
    NodeRole,
    PrefillLeg,
    Prompt,
    SamplingParams,
    Slo,
)
from pdserve.shared.errors import GrammarFailed, Overloaded, PeerLost
from tests.fakes.members import NO_GAP, output
from tests.unit.coordinator.requests.test_flow import Nodes, sent, token

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE
NAMES = ["r", "r-1", "r-2"]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    assert nodes.flow.num_inflight == 0
    assert not nodes.flow._router._books.queues.num_prompts.any(), "no prompt is still expected"


def start(nodes: Nodes, max_tokens: int = 4, slo: Slo | None = None) -> list[RunningRequest]:
    return nodes.flow.start_siblings(
        [
            GenerationRequest(
                request_id=name,
                prompt=Prompt([1, 2, 3]),
                sampling=SamplingParams(max_tokens=max_tokens, seed=seed),
                slo=slo or Slo(),
            )
            for seed, name in enumerate(NAMES)
        ]
    )


async def test_one_prefill_leg_and_a_decode_leg_each(nodes: Nodes) -> None:
    prefill = nodes.join("p", PREFILL)
    decodes = [nodes.join("d", DECODE), nodes.join("e", DECODE)]
    running = start(nodes)
    (leg,) = sent(prefill)
    assert isinstance(leg, PrefillLeg)
    assert leg.request_ids == NAMES
    assert [sibling.seed for sibling in leg.siblings] == [1, 2]
    books = nodes.flow._router._books
    assert books.queues.num_prompts[prefill.slot] == 1, "the prompt is computed once"
    assert {answer.route.decode_node for answer in running} == {"d", "e"}, "each where it is best"
    for answer, member in ((a, m) for a in running for m in decodes):
        if answer.route.decode_node == member.node_id:
            (own,) = (m for m in member.outbox.sent if m.request_id == answer.request.request_id)  # type: ignore[attr-defined]
            assert isinstance(own, DecodeLeg)
            assert own.source == prefill.address_for(member)
            assert own.prompt_id == "r"
            assert own.sampling == answer.request.sampling
    nodes.say(prefill, *(token(0, request_id=name) for name in NAMES))
    for answer, name in zip(running, NAMES, strict=True):
        nodes.say(decodes[0], *(token(i, last=i == 3, request_id=name) for i in (1, 2, 3)))
        assert await output(answer) == [100, 101, 102, 103]
    assert sent(prefill) == []


async def test_answers_of_one_token_have_no_decode_legs(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = start(nodes, max_tokens=1)
    (leg,) = sent(prefill)
    assert isinstance(leg, PrefillLeg)
    assert (leg.handoff, len(leg.siblings)) == (False, 2)
    nodes.say(prefill, *(token(0, last=True, request_id=name) for name in NAMES))
    assert [await output(answer) for answer in running] == [[100]] * 3
    assert sent(decode) == []


@pytest.mark.parametrize(("mode", "max_tokens"), [("colocated", 4), ("disaggregated", 0)])
async def test_where_nothing_is_handed_off_the_others_follow_token_one(
    mode: str, max_tokens: int
) -> None:
    """Of a cached prompt, the rest of a block is left to compute."""
    nodes = Nodes(mode=mode)  # type: ignore[arg-type]
    member = nodes.join("p" if max_tokens == 0 else "d", PREFILL if max_tokens == 0 else DECODE)
    running = start(nodes, max_tokens)
    (leg,) = sent(member)
    assert leg.request_id == "r"  # type: ignore[attr-defined]
    nodes.clock.advance(5.0)
    nodes.say(member, token(0, last=True))
    legs = sent(member)
    assert [leg.request_id for leg in legs] == ["r-1", "r-2"]  # type: ignore[attr-defined]
    left_s = [leg.slo.deadline_s for leg in legs]  # type: ignore[attr-defined]
    assert left_s == [55.0, 55.0], "of the call's time-out"
    for name in NAMES[1:]:
        nodes.say(member, token(0, last=True, request_id=name))
    assert [await output(answer) for answer in running] == [[100]] * 3
    assert nodes.flow.num_inflight == 0


async def test_without_token_one_what_ends_the_first_ends_all(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = start(nodes)
    sent(prefill), sent(decode)
    failure = LegFailed(request_id="r", code=GrammarFailed.code, message="a dead end")
    nodes.flow.leg_failed(failure, prefill)
    for member in (prefill, decode):
        cancelled = [m.request_id for m in sent(member) if isinstance(m, CancelLeg)]
        assert cancelled == NAMES
    for answer in running:
        with pytest.raises(GrammarFailed):
            await output(answer)


async def test_who_goes_on_behind_token_one_takes_nobody_along(nodes: Nodes) -> None:
    """The others have their prompt; with one that goes on alone they would not be sent again."""
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    first, *others = start(nodes)
    nodes.say(prefill, token(0, request_id="r"))
    nodes.flow.leg_failed(LegFailed(request_id="r", code=PeerLost.code, message="cut"), decode)
    assert first.dispatch is None
    assert all(other.dispatch is not None for other in others)
    for answer in (first, *others):
        answer.cancel("seen")


async def test_behind_token_one_each_is_on_its_own(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    first, second, third = start(nodes)
    nodes.say(prefill, *(token(0, request_id=name) for name in NAMES))
    first.cancel("stop string")
    failure = LegFailed(request_id="r-1", code=GrammarFailed.code, message="a dead end")
    nodes.flow.leg_failed(failure, decode)
    with pytest.raises(GrammarFailed):
        await output(second)
    nodes.say(decode, *(token(i, last=i == 3, request_id="r-2") for i in (1, 2, 3)))
    assert await output(third) == [100, 101, 102, 103]


async def test_more_than_may_ever_be_in_flight_are_refused() -> None:
    nodes = Nodes(max_inflight=2)
    nodes.join("p", PREFILL), nodes.join("d", DECODE)
    with pytest.raises(Overloaded, match="this call adds 3"):
        start(nodes)
    assert nodes.flow.num_inflight == 0


async def test_those_that_will_follow_have_their_places_already() -> None:
    nodes, promise = Nodes(mode="colocated", max_inflight=4), Slo(name="standard", ttft_s=10.0)
    member = nodes.join("d", DECODE)
    first, second, third = start(nodes)
    one = nodes.start("one", slo=promise)
    with pytest.raises(Overloaded, match="4 requests are in flight"):
        nodes.start("two", slo=promise)
    second.cancel("on no node yet")
    three = nodes.start("three", slo=promise)
    nodes.say(member, token(0))
    assert third.dispatch is not None
    with pytest.raises(Overloaded, match="4 requests are in flight"):
        nodes.start("four", slo=promise)
    first.cancel("done")
    five = nodes.start("five", slo=promise)
    for running in (third, one, three, five):
        running.cancel("done")
    assert nodes.flow.num_inflight == 0


async def test_those_that_follow_have_what_is_left_of_the_time() -> None:
    nodes = Nodes(mode="colocated")
    member = nodes.join("d", DECODE)
    promise = Slo(name="standard", ttft_s=10.0, tpot_s=0.5, hold_s=4.0, deadline_s=100.0)
    running = start(nodes, slo=promise)
    nodes.clock.advance(3.0)
    sent(member)
    nodes.say(member, token(0))
    for leg in sent(member):
        assert isinstance(leg, DecodeLeg)
        assert (leg.slo.ttft_s, leg.slo.tpot_s, leg.slo.hold_s) == (7.0, 0.5, 1.0)
    for answer in running:
        answer.cancel("done")


async def test_they_wait_for_room_together() -> None:
    nodes = Nodes(times=NO_GAP)
    prefill, _ = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    others = [nodes.start(f"other {i}") for i in range(6)]  # of 8 that may be in flight
    running = start(nodes)
    status = nodes.flow.status()
    assert (status.waiting, status.inflight) == (1, len(others))
    assert all(answer.dispatch is None for answer in running)
    sent(prefill)
    others.pop().cancel("done")
    for _ in range(3):
        await asyncio.sleep(0)
    (leg,) = (m for m in sent(prefill) if isinstance(m, PrefillLeg))
    assert leg.request_ids == NAMES
    assert all(answer.dispatch is not None for answer in running)
    for answer in (*running, *others):
        answer.cancel("done")
