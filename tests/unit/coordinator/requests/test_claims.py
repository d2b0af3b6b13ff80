"""Requests that a lost coordinator may have begun go on where nodes still have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member
from coordinator.requests.resumes import MOST_PER_NODE
from coordinator.requests.running import RunningRequest
from coordinator.requests.surroundings import FlowTimes
from pdserve.protocol import (
    Claim,
    Claimed,
    DecodeLeg,
    FinishReason,
    NodeRole,
    PrefillLeg,
    Prompt,
    PromptLogprobs,
    SamplingParams,
    Slo,
    TokenLogprobs,
)
from pdserve.shared.errors import Overloaded
from tests.fakes.members import TIMES, output
from tests.unit.coordinator.requests.test_flow import Nodes, sent, token
from tests.unit.coordinator.requests.test_resumes import decode_leg, further, legs, settle
from tests.waits import until

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE


@pytest.fixture
def times() -> FlowTimes:
    return TIMES


@pytest.fixture
def nodes(times: FlowTimes) -> Iterator[Nodes]:
    nodes = Nodes(times=times)
    yield nodes
    assert nodes.flow.num_inflight == 0
    assert not nodes.flow._claims._asked
    assert not nodes.flow.resumes._troubles
    assert len(nodes.flow._admission._in_flight) == 0


def start(nodes: Nodes, *names: str, logprobs: int | None = None) -> list[RunningRequest]:
    return nodes.flow.start_siblings(
        [
            GenerationRequest(
                request_id=name,
                prompt=Prompt([1, 2, 3]),
                sampling=SamplingParams(max_tokens=4, seed=seed, logprobs=logprobs),
                is_claimable=True,
            )
            for seed, name in enumerate(names)
        ]
    )


def claimed(member: Member) -> list[str]:
    messages = sent(member)
    assert all(isinstance(message, Claim) for message in messages), "asked before anything is sent"
    return sorted(message.request_id for message in messages)  # type: ignore[attr-defined]


async def test_a_stream_that_a_node_has_goes_on(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    (running,) = start(nodes, "r")
    leg_id = running.request.request_id
    assert claimed(prefill) == claimed(decode) == ["r"]
    nodes.flow.claimed(Claimed(request_id="r"), prefill)
    nodes.flow.claimed(Claimed(request_id="r", token_ids=[100, 101], accepted=1, refused=4), decode)
    leg = await decode_leg(decode)
    assert (leg.request_id, leg.output_token_ids) == (f"{leg_id}1", [100, 101])
    assert leg.is_claimable
    assert (leg.accepted, leg.refused) == (1, 4)
    further(nodes, decode, f"{leg_id}1", 2)
    assert await output(running) == [100, 101, 102, 103]


@pytest.mark.parametrize("order", [1, -1], ids=["the shorter first", "the longer first"])
async def test_of_a_stream_that_two_nodes_have_the_longer_part_goes_on(
    nodes: Nodes, order: int
) -> None:
    """One has taken it over from the other, and their coordinator is lost."""
    former, taker = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    (running,) = start(nodes, "r")
    leg_id = running.request.request_id
    sent(taker)
    answers = [([100], former), ([100, 101], taker)]
    for token_ids, member in answers[::order]:
        nodes.flow.claimed(Claimed(request_id="r", token_ids=token_ids), member)
    leg = await decode_leg(taker)
    assert leg.output_token_ids == [100, 101]
    further(nodes, taker, f"{leg_id}1", 2)
    assert await output(running) == [100, 101, 102, 103]


async def test_log_probabilities_are_claimed_and_go_on_with_the_stream(nodes: Nodes) -> None:
    """From node to coordinator and on to the next node, whatever interrupts the stream there."""
    decode = nodes.join("d", DECODE)
    prefill = nodes.join("p", PREFILL)
    scores = [
        TokenLogprobs(chosen=-i / 3, top_ids=[i, 9], top_logprobs=[-0.1, -i]) for i in range(4)
    ]
    (running,) = start(nodes, "r", logprobs=2)
    leg_id = running.request.request_id
    sent(decode)
    nodes.flow.claimed(
        Claimed(request_id="r", token_ids=[100, 101], logprobs=PromptLogprobs.of(scores[:2])),
        decode,
    )
    nodes.flow.claimed(Claimed(request_id="r"), prefill)
    leg = await decode_leg(decode)
    assert leg.output_logprobs == PromptLogprobs.of(scores[:2])
    nodes.say(decode, token(2, request_id=f"{leg_id}1", logprobs=scores[2:3]))
    nodes.registry.remove(decode)
    decode = nodes.join("d", DECODE, life="2")
    leg = await decode_leg(decode)
    assert leg.output_token_ids == [100, 101, 102]
    assert leg.output_logprobs == PromptLogprobs.of(scores[:3])
    nodes.say(decode, token(3, last=True, request_id=f"{leg_id}2", logprobs=scores[3:]))
    events = []
    running.listen(events.append)
    assert [each for event in events for each in event.logprobs] == scores


async def test_tokens_without_their_log_probabilities_are_as_good_as_none(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    (running,) = start(nodes, "r", logprobs=0)
    leg_id = running.request.request_id
    nodes.flow.claimed(Claimed(request_id="r"), prefill)
    of_one = PromptLogprobs.of([TokenLogprobs(chosen=-1.0)])
    nodes.flow.claimed(Claimed(request_id="r", token_ids=[1, 2], logprobs=of_one), decode)
    leg = await decode_leg(decode)
    assert (leg.request_id, leg.output_token_ids) == (leg_id, [])
    running.cancel("done")


async def test_one_that_has_ended_meanwhile_is_shown(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    (running,) = start(nodes, "r")
    end = Claimed(request_id="r", token_ids=[100, 101], finish_reason=FinishReason.STOP)
    nodes.flow.claimed(end, decode)
    nodes.flow.claimed(Claimed(request_id="r"), prefill)
    assert await output(running) == [100, 101]
    assert await legs(prefill) == await legs(decode) == []


@pytest.mark.parametrize(
    ("how", "times"),
    [
        ("nobody has it", TIMES),
        ("nobody answers", replace(TIMES, answer_s=0.0)),
        ("the nodes are lost", TIMES),
    ],
)
async def test_what_no_node_has_begins_as_usual(nodes: Nodes, how: str) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    (running,) = start(nodes, "r")
    leg_id = running.request.request_id
    if how == "nobody has it":
        for member in (prefill, decode):
            nodes.flow.claimed(Claimed(request_id="r"), member)
    elif how == "the nodes are lost":
        for member in (prefill, decode):
            nodes.registry.remove(member)
        prefill, decode = nodes.join("p", PREFILL, life="2"), nodes.join("d", DECODE, life="2")
    while running.dispatch is None:
        await settle()
    assert any(isinstance(message, PrefillLeg) for message in sent(prefill))
    leg = next(message for message in sent(decode) if isinstance(message, DecodeLeg))
    assert (leg.request_id, leg.output_token_ids) == (leg_id, [])
    nodes.say(prefill, token(0, request_id=leg_id))
    further(nodes, decode, leg_id, 1)
    assert await output(running) == [100, 101, 102, 103]


async def test_those_that_nodes_are_asked_for_have_their_places_already() -> None:
    """Any number used to be admitted until nodes had answered: none was counted by then."""
    nodes = Nodes(max_inflight=2)
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = start(nodes, "r", "s")
    promise = Slo(name="standard", ttft_s=10.0)
    with pytest.raises(Overloaded, match="2 requests are in flight"):
        nodes.start("t", slo=promise)
    for member in (prefill, decode):
        for name in "rs":
            nodes.flow.claimed(Claimed(request_id=name), member)
    with pytest.raises(Overloaded, match="2 requests are in flight"):
        nodes.start("t", slo=promise)
    for answer in running:
        answer.cancel("done")
    nodes.start("t", slo=promise).cancel("done")


async def test_what_no_node_has_waits_for_no_interrupted_request() -> None:
    """Only a few of those are sent at a time, the most urgent first, whoever they belong to."""
    nodes = Nodes(max_inflight=64)
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = [start(nodes, f"r{n}")[0] for n in range(2 * MOST_PER_NODE + 1)]
    for answer in running:
        for member in (prefill, decode):
            nodes.flow.claimed(Claimed(request_id=answer.request_id), member)
    await settle()
    assert nodes.flow.num_on_nodes == len(running)
    for answer in running:
        answer.cancel("done")


async def test_a_stream_that_a_node_has_goes_on_whatever_waits_in_line() -> None:
    """Nodes used not to be asked for what had waited in line: it was computed again from the start.

    By the time when it is its turn they have given it up.
    """
    nodes = Nodes(max_inflight=1)
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    other = nodes.start("other")
    sent(prefill), sent(decode)
    (running,) = start(nodes, "r")
    assert "r" in nodes.flow._admission.line
    assert claimed(prefill) == claimed(decode) == ["r"]
    nodes.flow.claimed(Claimed(request_id="r"), prefill)
    nodes.flow.claimed(Claimed(request_id="r", token_ids=[100, 101]), decode)
    assert "r" not in nodes.flow._admission.line
    leg = await decode_leg(decode)
    assert leg.output_token_ids == [100, 101]
    with pytest.raises(Overloaded, match="2 requests are in flight"):
        nodes.start("t", slo=Slo(name="standard", ttft_s=10.0))
    further(nodes, decode, leg.request_id, 2)
    assert await output(running) == [100, 101, 102, 103]
    other.cancel("done")


async def test_what_no_node_has_waits_for_its_turn_in_line() -> None:
    """And until that is known, nobody waits for it."""
    nodes = Nodes(max_inflight=1)
    members = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    other = nodes.start("other")
    (running,) = start(nodes, "r")
    behind = nodes.start("behind", slo=Slo(name="standard", tenant="another"))
    other.cancel("done")
    nodes.flow._line_keeper._serve()
    assert running.dispatch is None, "nodes have not answered yet"
    assert behind.dispatch is not None
    behind.cancel("done")
    for member in members:
        nodes.flow.claimed(Claimed(request_id="r"), member)
    await until(lambda: running.dispatch is not None)
    running.cancel("done")


async def test_siblings_are_claimed_each_and_go_on_each(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    first, second = start(nodes, "r", "s")
    r, s = first.request.request_id, second.request.request_id
    assert claimed(prefill) == claimed(decode) == ["r", "s"]
    nodes.flow.claimed(Claimed(request_id="r"), prefill)
    nodes.flow.claimed(Claimed(request_id="s"), prefill)
    nodes.flow.claimed(Claimed(request_id="s", token_ids=[100]), decode)
    nodes.flow.claimed(Claimed(request_id="r"), decode)
    of_first, of_second = await legs(decode)
    assert (of_first.request_id, of_second.request_id) == (r, f"{s}1")
    (prompt,) = await legs(prefill)
    assert isinstance(prompt, PrefillLeg)
    assert prompt.request_ids == [r]
    nodes.say(prefill, token(0, request_id=r))
    further(nodes, decode, r, 1)
    further(nodes, decode, f"{s}1", 1)
    assert [await output(first), await output(second)] == [[100, 101, 102, 103]] * 2


@pytest.mark.parametrize("ended", ["r", "s"])
@pytest.mark.parametrize("is_asked_last", [False, True])
async def test_one_that_has_ended_leaves_its_sibling_to_go_on(
    nodes: Nodes, ended: str, is_asked_last: bool
) -> None:
    """The sibling used to wait for ever if it was the first one that had ended."""
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = dict(zip("rs", start(nodes, "r", "s"), strict=True))
    leg_ids = {name: running[name].request.request_id for name in "rs"}
    assert claimed(prefill) == claimed(decode) == ["r", "s"]
    (other,) = {"r", "s"} - {ended}
    end = Claimed(request_id=ended, token_ids=[100], finish_reason=FinishReason.STOP)
    told = [end, Claimed(request_id=other, token_ids=[100])]
    for message in reversed(told) if is_asked_last else told:
        nodes.flow.claimed(message, decode)
    for name in "rs":
        nodes.flow.claimed(Claimed(request_id=name), prefill)
    leg = await decode_leg(decode)
    assert (leg.request_id, leg.output_token_ids) == (f"{leg_ids[other]}1", [100])
    further(nodes, decode, leg.request_id, 1)
    assert await output(running[other]) == [100, 101, 102, 103]
    assert await output(running[ended]) == [100]


async def test_siblings_that_nobody_has_begin_together(nodes: Nodes) -> None:
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = start(nodes, "r", "s")
    r, s = (answer.request.request_id for answer in running)
    for member in (prefill, decode):
        for name in "rs":
            nodes.flow.claimed(Claimed(request_id=name), member)
    await settle()
    (prompt,) = (message for message in sent(prefill) if isinstance(message, PrefillLeg))
    assert prompt.request_ids == [r, s]
    for answer in running:
        answer.cancel("done")


async def test_a_client_that_leaves_while_nodes_are_asked(nodes: Nodes) -> None:
    decode = nodes.join("d", DECODE)
    nodes.join("p", PREFILL)
    (running,) = start(nodes, "r")
    running.cancel("gone")
    sent(decode)
    nodes.flow.claimed(Claimed(request_id="r", token_ids=[100]), decode)
    assert await legs(decode) == []
