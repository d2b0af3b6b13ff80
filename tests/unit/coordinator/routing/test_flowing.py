"""Flowing mode: where requests begin, and which streams move on."""

from __future__ import annotations

import pytest

from coordinator.nodes.registry import Member
from coordinator.prefixes.index import PromptHashes
from coordinator.routing import Booking
from coordinator.routing.flowing import FlowingStream, StreamHost, slack_at_end_s
from pdserve.protocol import NodeState, SamplingParams, Slo
from tests.unit.coordinator.routing.nodes import Nodes, names

CHUNK_S = 0.1  # of the nodes here; a decode step takes a millisecond for each stream
TIGHT = Slo(name="tight", ttft_s=1.0, tpot_s=0.01)
LOOSE = Slo(name="loose", ttft_s=1.0, tpot_s=0.2)


def begun(nodes: Nodes, member: Member, slo: Slo, max_tokens: int = 100) -> Booking:
    """A stream with two tokens."""
    request = nodes.request(10, slo=slo, max_tokens=max_tokens)
    prompt = PromptHashes(request.context)
    booking = nodes.router.dispatched(request, nodes.router.place_on(request, prompt, member))
    booking.progressed(1)
    booking.progressed(2)
    return booking


def queue(nodes: Nodes, member: Member, num_tokens: int) -> Booking:
    """A prompt waits there, a millisecond a token."""
    request = nodes.request(num_tokens, slo=LOOSE)
    prompt = PromptHashes(request.context)
    return nodes.router.dispatched(request, nodes.router.place_on(request, prompt, member))


def at_risk(nodes: Nodes, bookings: list[Booking]) -> list[Booking]:
    assert nodes.router.flowing is not None
    return nodes.router.flowing.at_risk(bookings)


# ---- the prediction ----------------------------------------------------------------------------


def test_without_prompts_a_stream_gains_what_its_pace_leaves() -> None:
    host = StreamHost(queue_s=0.0, chunk_s=CHUNK_S, pace_s=0.01)
    slack_s = slack_at_end_s(FlowingStream(0.05, 0.05, 40), host)
    assert slack_s == pytest.approx(0.05 + 40 * 0.25 * (0.045 - 0.01))


def test_a_pace_that_is_too_slow_counts_in_full() -> None:
    host = StreamHost(queue_s=0.0, chunk_s=CHUNK_S, pace_s=0.055)
    assert slack_at_end_s(FlowingStream(0.0, 0.05, 40), host) == pytest.approx(40 * (0.045 - 0.055))


def test_each_chunk_costs_what_it_takes_beyond_the_promise() -> None:
    host = StreamHost(queue_s=0.3, chunk_s=CHUNK_S, pace_s=0.045)
    assert slack_at_end_s(FlowingStream(0.2, 0.05, 40), host) == pytest.approx(0.2 - 3 * 0.05)


def test_no_more_chunks_count_than_it_has_tokens_left() -> None:
    host = StreamHost(queue_s=60.0, chunk_s=CHUNK_S, pace_s=0.001)
    assert slack_at_end_s(FlowingStream(0.2, 0.05, 2), host) == pytest.approx(0.2 - 2 * 0.05)


# ---- where requests begin ----------------------------------------------------------------------


def test_with_time_to_spare_it_begins_on_a_decode_node() -> None:
    nodes = Nodes("flowing", p=1, d=1)
    assert names(nodes.place(100, slo=LOOSE)) == (None, "d0")


def test_a_long_prompt_beside_streams_begins_on_a_prefill_node_and_stays() -> None:
    nodes = Nodes("flowing", p=1, d=1)
    for _ in range(4):
        begun(nodes, nodes.decode[0], TIGHT)
    assert names(nodes.place(600, slo=LOOSE)) == (None, "p0")


def test_one_that_could_not_bear_prompts_beside_it_is_handed_off() -> None:
    nodes = Nodes("flowing", p=1, d=1)
    for _ in range(4):
        begun(nodes, nodes.decode[0], TIGHT)
    assert names(nodes.place(600, slo=TIGHT)) == ("p0", "d0")
    answer = nodes.place(600, slo=TIGHT, max_tokens=1)
    assert names(answer) == (None, "p0"), "nothing is to be decoded"


def test_without_a_promise_the_faster_node_gets_it() -> None:
    nodes = Nodes("flowing", p=1, d=1)
    queue(nodes, nodes.decode[0], 2000)
    assert names(nodes.place(100)) == (None, "p0")


@pytest.mark.parametrize(("pools", "expected"), [({"p": 1}, "p0"), ({"d": 1}, "d0")])
def test_either_pool_serves_alone(pools: dict[str, int], expected: str) -> None:
    nodes = Nodes("flowing", **pools)
    assert nodes.router.can_route()
    assert names(nodes.place(600, slo=TIGHT)) == (None, expected)


def test_what_was_interrupted_goes_on_on_a_decode_node_or_else_on_any() -> None:
    nodes = Nodes("flowing", p=1, d=1)
    request = nodes.request(10)
    gone_on = type(request)(
        request_id="again",
        prompt=request.prompt,
        sampling=SamplingParams(max_tokens=9),
        output_token_ids=[1, 2],
    )
    assert names(nodes.router.place(gone_on)) == (None, "d0")
    nodes.report(nodes.decode[0], state=NodeState.DRAINING)
    assert names(nodes.router.place(gone_on)) == (None, "p0")


# ---- which streams move on ---------------------------------------------------------------------


def test_a_stream_with_slack_stays_and_one_without_flows() -> None:
    nodes = Nodes("flowing", p=1, d=1)
    loose, tight = (begun(nodes, nodes.prefill[0], slo) for slo in (LOOSE, TIGHT))
    assert at_risk(nodes, [loose, tight]) == [], "no prompt is beside them"
    prompt = queue(nodes, nodes.prefill[0], 600)
    assert at_risk(nodes, [loose, tight]) == [tight]
    prompt.progressed(1)
    assert at_risk(nodes, [loose, tight]) == []


def test_slack_that_was_gained_lets_it_stay() -> None:
    nodes = Nodes("flowing", p=1, d=1)
    stream = begun(nodes, nodes.prefill[0], TIGHT, max_tokens=200)
    queue(nodes, nodes.prefill[0], 600)
    assert at_risk(nodes, [stream])
    stream.progressed(100)  # in no time at all
    assert not at_risk(nodes, [stream])
    nodes.clock.advance(0.9)
    queue(nodes, nodes.prefill[0], 600)
    assert at_risk(nodes, [stream])


def test_those_that_would_be_latest_go_first() -> None:
    nodes = Nodes("flowing", p=1, d=1)
    sooner = begun(nodes, nodes.prefill[0], Slo(name="a", tpot_s=0.02))
    later = begun(nodes, nodes.prefill[0], Slo(name="b", tpot_s=0.01))
    queue(nodes, nodes.prefill[0], 2000)
    assert at_risk(nodes, [sooner, later]) == [later, sooner]


def test_nearly_done_it_stays() -> None:
    nodes = Nodes("flowing", p=1, d=1)
    stream = begun(nodes, nodes.prefill[0], TIGHT, max_tokens=10)
    queue(nodes, nodes.prefill[0], 2000)
    assert at_risk(nodes, [stream])
    stream.progressed(7)
    assert not at_risk(nodes, [stream])


def test_nobody_flows_from_decode_nodes_or_without_one_or_in_other_modes() -> None:
    nodes = Nodes("flowing", p=1, d=1)
    stream = begun(nodes, nodes.decode[0], TIGHT)
    queue(nodes, nodes.decode[0], 2000)
    assert not at_risk(nodes, [stream])
    alone = Nodes("flowing", p=1)
    stream = begun(alone, alone.prefill[0], TIGHT)
    queue(alone, alone.prefill[0], 2000)
    assert not at_risk(alone, [stream])
    adaptive = Nodes("adaptive", p=1, d=1)
    assert adaptive.router.flowing is None
