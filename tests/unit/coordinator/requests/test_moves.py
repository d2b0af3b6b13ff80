"""Live migration: who moves, where to, when; and moves of streams that are not taken over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from coordinator.nodes.registry import Member
from coordinator.requests.moves import MOST_PREFETCHES
from coordinator.requests.running import RunningRequest
from coordinator.requests.surroundings import FlowTimes
from pdserve.protocol import (
    CancelLeg,
    DecodeLeg,
    NodeRole,
    NodeState,
    PerfReport,
    Prefetch,
    Prefetched,
    Slo,
    StepCosts,
)
from pdserve.shared.errors import RequestCancelled
from tests.fakes.members import TIMES, output, report
from tests.unit.coordinator.requests.test_flow import Nodes, sent, token
from tests.unit.coordinator.requests.test_resumes import decode_leg, further, settle

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE


@pytest.fixture
def times() -> FlowTimes:
    return TIMES


@pytest.fixture
def nodes(times: FlowTimes) -> Iterator[Nodes]:
    nodes = Nodes(max_inflight=100, takes_over=False, times=times)
    yield nodes
    assert nodes.flow.num_inflight == 0
    assert not nodes.flow._moves._moves
    assert not nodes.flow.resumes._troubles


def stream(nodes: Nodes, name: str = "r") -> RunningRequest:
    """A request with two tokens."""
    running = nodes.start(name)
    assert running.dispatch is not None
    prefill, decode = running.dispatch.prefill, running.dispatch.decode
    assert prefill is not None
    assert decode is not None
    nodes.say(prefill, token(0, request_id=name))
    nodes.say(decode, token(1, request_id=name))
    return running


async def asked(member: Member) -> list[Prefetch]:
    await settle()
    return [message for message in sent(member) if isinstance(message, Prefetch)]


def drain(nodes: Nodes, member: Member) -> None:
    report(nodes.registry, member, DECODE, state=NodeState.DRAINING)


async def test_a_stream_goes_on_until_its_kv_is_where_it_moves_to(nodes: Nodes) -> None:
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = stream(nodes)
    target = nodes.join("d2", DECODE)
    drain(nodes, source)
    (prefetch,) = await asked(target)
    assert (prefetch.request_id, prefetch.prompt.token_ids) == ("r~1", [1, 2, 3, 100, 101])
    sent(source)
    nodes.flow.prefetched(Prefetched(request_id="r~1", num_tokens=0), target)
    await settle()
    assert not sent(source), "it goes on until it has its next token"
    nodes.say(source, token(2))
    leg = await decode_leg(target)
    assert (leg.request_id, leg.source) == ("r~1", None)
    assert leg.output_token_ids == [100, 101, 102]
    (cancel,) = sent(source)
    assert isinstance(cancel, CancelLeg)
    assert cancel.request_id == "r"
    further(nodes, target, "r~1", 3)
    assert await output(running) == [100, 101, 102, 103]
    pauses = nodes.metrics.registry.get_sample_value("pdserve_request_move_seconds_count")
    assert pauses == 1


async def test_without_a_place_it_stays_until_there_is_one(nodes: Nodes) -> None:
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = stream(nodes)
    drain(nodes, source)
    await settle()
    nodes.say(source, token(2))
    assert await asked(nodes.join("d2", DECODE)), "it has joined since"
    running.cancel("done")
    nodes.flow._moves._carry_out("r~1")


async def test_a_node_that_leaves_the_pool_gives_its_streams_away(nodes: Nodes) -> None:
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = stream(nodes)
    target = nodes.join("d2", DECODE)
    report(nodes.registry, source, PREFILL)
    assert await asked(target)
    running.cancel("done")
    nodes.flow._moves._carry_out("r~1")


async def test_a_few_move_to_a_node_at_a_time(nodes: Nodes) -> None:
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = [stream(nodes, str(i)) for i in range(MOST_PREFETCHES + 2)]
    target = nodes.join("d2", DECODE)
    drain(nodes, source)
    asked_first = await asked(target)
    assert len(asked_first) == MOST_PREFETCHES
    nodes.flow.prefetched(Prefetched(request_id="0~1", num_tokens=0), target)
    nodes.say(source, token(2, request_id="0"))
    assert [p.request_id for p in await asked(target)] == [f"{MOST_PREFETCHES}~1"]
    for answer in running:
        answer.cancel("done")
    for request_id in list(nodes.flow._moves._moves):
        nodes.flow._moves._carry_out(request_id)


@pytest.mark.parametrize("times", [replace(TIMES, prefetch_s=0.0)])
async def test_a_slow_prefetch_is_not_waited_for(nodes: Nodes) -> None:
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = stream(nodes)
    target = nodes.join("d2", DECODE)
    drain(nodes, source)
    await settle()
    while not any(isinstance(message, DecodeLeg) for message in sent(target)):
        await settle()
    nodes.flow.prefetched(Prefetched(request_id="r~1", num_tokens=0), target)
    further(nodes, target, "r~1", 2)
    assert await output(running) == [100, 101, 102, 103]


async def test_a_target_is_ready_when_the_source_has_been_lost(nodes: Nodes) -> None:
    """The stream has gone on by itself, and is no longer interrupted with its next token."""
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = stream(nodes)
    target = nodes.join("d2", DECODE)
    drain(nodes, source)
    assert await asked(target)
    nodes.registry.remove(source)
    leg = await decode_leg(target)
    assert leg.request_id == "r~1", "as the prefetch"
    nodes.flow.prefetched(Prefetched(request_id="r~1", num_tokens=0), target)
    nodes.say(target, token(2, request_id="r~1"))
    assert not nodes.flow.resumes._troubles
    nodes.say(target, token(3, last=True, request_id="r~1"))
    assert await output(running) == [100, 101, 102, 103]
    nodes.flow._moves._carry_out("r~1")


@pytest.mark.parametrize("lost", ["source", "target", "both"])
async def test_nodes_are_lost_during_a_move(nodes: Nodes, lost: str) -> None:
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = stream(nodes)
    target = nodes.join("d2", DECODE)
    drain(nodes, source)
    assert await asked(target)
    spare = nodes.join("d3", DECODE)
    if lost in ("source", "both"):
        nodes.registry.remove(source)
    if lost in ("target", "both"):
        nodes.registry.remove(target)
    await settle()
    if lost == "target":  # the stream has stayed
        nodes.flow._moves._carry_out("r~1")
        nodes.say(source, token(2), token(3, last=True))
    else:
        goes_on = running.dispatch
        assert goes_on is not None
        assert goes_on.decode in (target, spare)
        further(nodes, goes_on.decode, running.request.request_id, 2)
        nodes.flow._moves._carry_out("r~1")
    assert await output(running) == [100, 101, 102, 103]


async def test_a_client_that_leaves_during_a_move(nodes: Nodes) -> None:
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = stream(nodes)
    target = nodes.join("d2", DECODE)
    drain(nodes, source)
    assert await asked(target)
    running.cancel("gone")
    nodes.flow.prefetched(Prefetched(request_id="r~1", num_tokens=0), target)
    await settle()
    assert not [message for message in sent(target) if isinstance(message, DecodeLeg)]
    nodes.flow._moves._carry_out("r~1")
    with pytest.raises(RequestCancelled):
        await output(running)


async def test_a_sick_nodes_streams_go_on_elsewhere_at_once(nodes: Nodes) -> None:
    nodes.join("p", PREFILL)
    source = nodes.join("d1", DECODE)
    running = stream(nodes)
    target = nodes.join("d2", DECODE)
    report(nodes.registry, source, DECODE, state=NodeState.SICK, reason="stuck: a step")
    leg = await decode_leg(target)
    further(nodes, target, leg.request_id, 2)
    assert await output(running) == [100, 101, 102, 103]


# ---- flowing mode ------------------------------------------------------------------------------

PERF = PerfReport(
    step=StepCosts(knot_tokens=[1, 100], knot_s=[0.001, 0.1]), token_budget=100, max_batch_size=64
)


@pytest.fixture
def flowing() -> Iterator[Nodes]:
    nodes = Nodes(mode="flowing", max_inflight=100, takes_over=False)
    yield nodes
    assert nodes.flow.num_inflight == 0
    assert not nodes.flow._moves._moves


def flowing_pair(nodes: Nodes) -> tuple[Member, Member, RunningRequest]:
    """A stream with two tokens on the prefill node, and a decode node that has just come."""
    source = nodes.join("p", PREFILL)
    nodes.registry.profiled(source, PERF)
    slo = Slo(name="tight", ttft_s=1.0, tpot_s=0.01)
    running = nodes.start(max_tokens=60, slo=slo)
    (leg,) = [message for message in sent(source) if isinstance(message, DecodeLeg)]
    assert leg.flows
    nodes.say(source, token(0), token(1))
    target = nodes.join("d", DECODE)
    nodes.registry.profiled(target, PERF)
    return source, target, running


async def test_a_stream_flows_when_prompts_beside_it_would_make_it_late(flowing: Nodes) -> None:
    source, target, running = flowing_pair(flowing)
    assert not await asked(target), "nothing is beside it"
    report(flowing.registry, source, PREFILL, queued_tokens=2000)  # of another coordinator
    (prefetch,) = await asked(target)
    assert prefetch.request_id == "r~1"
    report(flowing.registry, source, PREFILL, queued_tokens=2000)
    assert not await asked(target), "it is on its way already"
    flowing.flow.prefetched(Prefetched(request_id="r~1", num_tokens=0), target)
    flowing.say(source, token(2))
    leg = await decode_leg(target)
    assert leg.output_token_ids == [100, 101, 102]
    assert not leg.flows, "a decode node spares its streams"
    flowing.say(target, token(3, request_id="r~1"))
    report(flowing.registry, target, DECODE, queued_tokens=2000)
    await settle()
    assert not [message for message in sent(source) if isinstance(message, Prefetch)]
    running.cancel("done")


async def test_a_drained_decode_node_gives_its_streams_to_prefill_nodes(flowing: Nodes) -> None:
    """If there is no other decode node."""
    source = flowing.join("d", DECODE)
    running = stream_on(flowing, source)
    target = flowing.join("p", PREFILL)
    drain(flowing, source)
    assert await asked(target)
    running.cancel("done")
    flowing.flow._moves._carry_out("r~1")


def stream_on(nodes: Nodes, member: Member) -> RunningRequest:
    running = nodes.start()
    assert running.dispatch is not None
    assert running.dispatch.decode is member
    nodes.say(member, token(0), token(1))
    return running


@pytest.mark.parametrize("lost", ["source", "target"])
async def test_nodes_are_lost_while_a_stream_flows(flowing: Nodes, lost: str) -> None:
    source, target, running = flowing_pair(flowing)
    report(flowing.registry, source, PREFILL, queued_tokens=2000)
    assert await asked(target)
    flowing.registry.remove(source if lost == "source" else target)
    await settle()
    stays_on = target if lost == "source" else source
    assert running.dispatch is not None
    assert running.dispatch.decode is stays_on
    flowing.flow._moves._carry_out("r~1")
    assert running.dispatch.decode is stays_on
    running.cancel("done")
