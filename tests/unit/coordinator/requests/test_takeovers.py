"""Streams that are taken over while they run: what the coordinator says, and what follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from coordinator.nodes.registry import Member
from coordinator.requests.moves import MOST_PER_TARGET
from coordinator.requests.running import RunningRequest
from coordinator.requests.surroundings import FlowTimes
from pdserve.protocol import (
    CancelLeg,
    DecodeLeg,
    LegFailed,
    NodeRole,
    NodeState,
    PhaseTimes,
    Prefetch,
    TokenEvent,
    TransportReach,
)
from pdserve.shared.errors import PeerLost, RequestCancelled
from tests.fakes.members import TIMES, output, report
from tests.unit.coordinator.requests.test_flow import Nodes, sent, token
from tests.unit.coordinator.requests.test_moves import drain, flowing_pair, stream
from tests.unit.coordinator.requests.test_resumes import decode_leg, further, settle

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE
EXPECTED = [100, 101, 102, 103]


@pytest.fixture
def times() -> FlowTimes:
    return TIMES


@pytest.fixture
def nodes(times: FlowTimes) -> Iterator[Nodes]:
    nodes = Nodes(max_inflight=100, times=times)
    yield nodes
    assert nodes.flow.num_inflight == 0
    assert not nodes.flow._dispatcher.by_leg
    assert not nodes.flow.resumes._troubles
    assert not nodes.flow._moves._moves
    slots = [member.slot for member in nodes.registry]
    assert not nodes.flow._router._books.decodes.legs[slots].any(), "all bookings have ended"


def last(index: int, request_id: str = "r") -> TokenEvent:
    """A stream's last token on the node that it leaves."""
    return replace(token(index, request_id=request_id), is_taken_over=True)


async def moving(nodes: Nodes) -> tuple[Member, Member, RunningRequest]:
    """A stream with two tokens whose node drains, and the node that is to take it over."""
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = stream(nodes)
    target = nodes.join("d2", DECODE)
    sent(source)
    drain(nodes, source)
    leg = await decode_leg(target)
    assert (leg.request_id, leg.takes_over) == ("r~1", "r")
    return source, target, running


async def legs(member: Member) -> list[DecodeLeg]:
    await settle()
    return [message for message in sent(member) if isinstance(message, DecodeLeg)]


def cancelled(member: Member) -> list[str]:
    return [message.request_id for message in sent(member) if isinstance(message, CancelLeg)]


def fail(nodes: Nodes, member: Member, request_id: str = "r~1") -> None:
    error = PeerLost("the session broke")
    failure = LegFailed(request_id=request_id, code=error.code, message=error.message)
    nodes.flow.leg_failed(failure, member)


def num_moved(nodes: Nodes) -> float | None:
    return nodes.metrics.registry.get_sample_value("pdserve_request_move_seconds_count")


async def test_a_stream_runs_on_until_it_is_taken_over(nodes: Nodes) -> None:
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = stream(nodes)
    target = nodes.join("d2", DECODE)
    drain(nodes, source)
    leg = await decode_leg(target)
    assert (leg.request_id, leg.takes_over) == ("r~1", "r")
    assert leg.source is not None
    assert leg.source.node_id == "d1"
    assert leg.output_token_ids == [100, 101]
    assert running.route.decode_node == "d1"
    nodes.say(source, last(2))
    assert running.route.decode_node == "d2"
    assert not cancelled(source), "it knows that its leg is over"
    nodes.clock.advance(0.25)
    further(nodes, target, "r~1", 3)
    assert await output(running) == EXPECTED
    assert num_moved(nodes) == 1
    pause = nodes.metrics.registry.get_sample_value("pdserve_request_move_seconds_sum")
    assert pause == 0.25
    assert [attempt.decode_node for attempt in running.journey.attempts] == ["d1", "d2"]


async def test_the_target_may_be_heard_before_the_sources_last_token(nodes: Nodes) -> None:
    source, target, running = await moving(nodes)
    nodes.say(target, token(3, last=True, request_id="r~1"))
    assert running.num_tokens == 2
    nodes.say(source, last(2))
    assert await output(running) == EXPECTED
    assert num_moved(nodes) == 1


async def test_its_prompt_was_neither_queued_nor_computed_where_it_ends(nodes: Nodes) -> None:
    source, target, running = await moving(nodes)
    nodes.say(source, last(2))
    end = token(3, last=True, request_id="r~1")
    nodes.say(target, replace(end, times=PhaseTimes(decode_s=0.5)))
    assert await output(running) == EXPECTED
    counts = {
        phase: nodes.metrics.registry.get_sample_value(
            f"pdserve_request_{phase}_time_seconds_count"
        )
        for phase in ("queue", "prefill", "decode")
    }
    assert counts == {"queue": 0, "prefill": 0, "decode": 1}


async def test_a_stream_may_end_before_it_is_taken_over(nodes: Nodes) -> None:
    source, target, running = await moving(nodes)
    nodes.say(source, token(2), token(3, last=True))
    assert await output(running) == EXPECTED
    assert cancelled(target) == ["r~1"]


async def test_a_client_that_leaves_meanwhile(nodes: Nodes) -> None:
    source, target, running = await moving(nodes)
    running.cancel("gone")
    assert cancelled(source) == ["r"]
    assert cancelled(target) == ["r~1"]
    with pytest.raises(RequestCancelled):
        await output(running)


async def test_a_stream_that_is_not_taken_over_stays_and_moves_without_that(nodes: Nodes) -> None:
    source, target, running = await moving(nodes)
    fail(nodes, target)
    assert running.route.decode_node == "d1"
    await settle()
    (cancel, prefetch) = sent(target)
    assert isinstance(cancel, CancelLeg)
    assert isinstance(prefetch, Prefetch)
    assert prefetch.request_id == "r~2", "no id is used again"
    nodes.say(source, token(2), token(3, last=True))
    assert await output(running) == EXPECTED
    nodes.flow._moves._carry_out("r~2")


@pytest.mark.parametrize("times", [dataclasses.replace(TIMES, takeover_s=0.0)])
async def test_a_target_that_does_nothing_is_not_waited_for(nodes: Nodes) -> None:
    source, _target, running = await moving(nodes)
    while running.successor is not None:
        await settle()
    assert running.route.decode_node == "d1"
    nodes.say(source, token(2), token(3, last=True))
    assert await output(running) == EXPECTED
    nodes.flow._moves._carry_out("r~2")


async def test_one_that_has_ended_on_its_node_and_has_no_taker_resumes(nodes: Nodes) -> None:
    """The taker fails, and the message that the stream has ended is on its way already."""
    source, target, running = await moving(nodes)
    fail(nodes, target)
    nodes.say(source, last(2))
    leg = await decode_leg(target)
    assert (leg.takes_over, leg.source) == ("", None)
    assert leg.output_token_ids == [100, 101, 102]
    further(nodes, target, leg.request_id, 3)
    assert await output(running) == EXPECTED
    nodes.flow._moves._carry_out("r~2")


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("lost", ["source", "target"])
async def test_nodes_are_lost_meanwhile(nodes: Nodes, lost: str, is_taken: bool) -> None:
    source, target, running = await moving(nodes)
    spare = nodes.join("d3", DECODE)
    if is_taken:
        nodes.say(source, last(2))
    nodes.registry.remove(source if lost == "source" else target)
    await settle()
    emitted = running.num_tokens
    match lost, is_taken:
        case "target", False:  # it stays, and is taken over by another one
            leg = await decode_leg(spare)
            assert (leg.request_id, leg.takes_over) == ("r~2", "r")
            nodes.say(source, last(2))
            further(nodes, spare, "r~2", 3)
        case "source", True:
            further(nodes, target, "r~1", emitted)
        case _:
            dispatch = running.dispatch
            assert dispatch is not None
            assert running.request.request_id == "r~2"
            further(nodes, dispatch.decode, "r~2", emitted)  # type: ignore[arg-type]
    assert await output(running) == EXPECTED


async def test_a_target_that_drains_in_turn_takes_nothing_over(nodes: Nodes) -> None:
    _source, target, running = await moving(nodes)
    drain(nodes, target)
    assert cancelled(target) == ["r~1"]
    (leg,) = await legs(nodes.join("d3", DECODE))
    assert (leg.request_id, leg.takes_over) == ("r~2", "r")
    running.cancel("done")


async def test_a_source_whose_leg_fails_meanwhile(nodes: Nodes) -> None:
    source, target, running = await moving(nodes)
    fail(nodes, source, "r")
    assert cancelled(target) == ["r~1"]
    leg = await decode_leg(target)
    assert (leg.request_id, leg.takes_over) == ("r~2", "")
    fail(nodes, target, "r~1")  # said before it heard
    further(nodes, target, "r~2", 2)
    assert await output(running) == EXPECTED


async def test_many_are_taken_over_at_a_time(nodes: Nodes) -> None:
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = [stream(nodes, str(i)) for i in range(MOST_PER_TARGET + 2)]
    target = nodes.join("d2", DECODE)
    drain(nodes, source)
    assert len(await legs(target)) == MOST_PER_TARGET
    nodes.say(source, last(2, "0"))
    (leg,) = await legs(target)
    assert leg.takes_over == str(MOST_PER_TARGET)
    for answer in running:
        answer.cancel("done")


async def test_who_cannot_be_taken_over_is_fetched_first(nodes: Nodes) -> None:
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = stream(nodes)
    target = nodes.join("d2", DECODE)
    target.reaches = frozenset({("r", TransportReach(name="other"))})
    drain(nodes, source)
    await settle()
    assert [type(message) for message in sent(target)] == [Prefetch]
    running.cancel("done")
    nodes.flow._moves._carry_out("r~1")


async def test_a_stream_flows_by_being_taken_over() -> None:
    flowing = Nodes(mode="flowing", max_inflight=100)
    source, target, running = flowing_pair(flowing)
    report(flowing.registry, source, PREFILL, queued_tokens=2000)
    (leg,) = await legs(target)
    assert leg.takes_over == "r"
    assert not leg.flows, "a decode node spares its streams"
    report(flowing.registry, source, PREFILL, queued_tokens=2000)
    assert not await legs(target), "it is on its way already"
    flowing.say(source, last(2))
    assert running.route.decode_node == "d"
    running.cancel("done")


async def test_a_sick_target_takes_nothing_over(nodes: Nodes) -> None:
    _source, target, running = await moving(nodes)
    report(nodes.registry, target, DECODE, state=NodeState.SICK, reason="stuck: a step")
    assert "r~1" in cancelled(target)
    assert running.route.decode_node == "d1"
    running.cancel("done")
