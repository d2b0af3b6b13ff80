"""A request's way through the cluster, as phases on the coordinator's clock."""

from __future__ import annotations

import pytest

from coordinator.requests.journey import Journey, Phase, phases
from pdserve.protocol import NodeRole, PhaseTimes, TokenBatch, TokenEvent
from tests.unit.coordinator.requests.test_flow import Nodes, token

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE


def journey() -> Journey:
    return Journey("r", "standard", 7, received_s=10.0, started_s=10.5)


def told(found: list[Phase]) -> list[tuple[str, str, float, float]]:
    return [(p.name, p.node, round(p.start_s, 6), round(p.end_s, 6)) for p in found]


def test_a_handed_off_request_is_laid_out_backwards_from_what_was_seen() -> None:
    one = journey()
    one.sent("p", "d", 11.0, is_resumed=False)
    one.token_one(3, 13.0)
    one.reported(PhaseTimes(queue_s=0.25, prefill_s=1.5), "p")
    times = PhaseTimes(
        handoff_s=1.0, handoff_room_s=0.5, handoff_copy_s=0.25, handoff_step_s=0.125, decode_s=5.0
    )
    one.reported(times, "d")
    one.ended_s = 20.0
    assert told(phases(one)) == [
        ("admission", "", 10.0, 10.5),
        ("queue", "", 10.5, 11.0),
        ("queue", "p", 11.25, 11.5),
        ("prefill", "p", 11.5, 13.0),
        ("wait for room", "d", 14.125, 14.625),
        ("pull", "d", 14.625, 14.875),
        ("join", "d", 14.875, 15.0),
        ("decode", "d", 15.0, 20.0),
    ]


def test_a_request_on_one_node() -> None:
    one = journey()
    one.sent("", "d", 10.5, is_resumed=False)
    one.reported(PhaseTimes(queue_s=0.5, prefill_s=1.0, decode_s=2.0), "d")
    one.ended_s = 14.5
    assert told(phases(one)) == [
        ("admission", "", 10.0, 10.5),
        ("queue", "d", 11.0, 11.5),
        ("prefill", "d", 11.5, 12.5),
        ("decode", "d", 12.5, 14.5),
    ]


def test_an_interrupted_request_is_resumed_elsewhere() -> None:
    one = journey()
    one.sent("p", "d1", 10.5, is_resumed=False)
    one.token_one(0, 11.0)
    one.interrupted("node_lost", 12.0)
    one.sent("", "d2", 13.0, is_resumed=True)
    one.reported(PhaseTimes(queue_s=0.5, prefill_s=0.5, decode_s=2.0), "d2")
    one.ended_s = 16.0
    assert told(phases(one)) == [
        ("admission", "", 10.0, 10.5),
        ("prefill", "p", 10.5, 11.0),
        ("decode", "d1", 11.0, 12.0),
        ("resume", "", 12.0, 13.0),
        ("queue", "d2", 13.0, 13.5),
        ("prefill", "d2", 13.5, 14.0),
        ("decode", "d2", 14.0, 16.0),
    ]


def test_durations_that_do_not_fit_are_cut() -> None:
    one = journey()
    one.sent("p", "d", 11.0, is_resumed=False)
    one.token_one(0, 12.0)
    one.reported(PhaseTimes(queue_s=50.0, prefill_s=40.0), "p")
    one.reported(PhaseTimes(decode_s=60.0, handoff_room_s=9.0), "d")
    one.ended_s = 13.0
    found = phases(one)
    assert all(10.0 <= phase.start_s <= phase.end_s <= 13.0 for phase in found)
    assert [phase.name for phase in found] == ["admission", "queue", "prefill", "decode"]


def test_a_request_that_was_never_sent_only_waited() -> None:
    one = journey()
    one.ended_s = 12.0
    assert told(phases(one)) == [("admission", "", 10.0, 10.5), ("queue", "", 10.5, 12.0)]


@pytest.mark.parametrize("fails", [False, True])
async def test_the_flow_tells_of_each_request_that_has_ended(fails: bool) -> None:
    journeys: list[Journey] = []
    nodes = Nodes(on_ended=lambda journey, _: journeys.append(journey))
    prefill, decode = nodes.join("p", PREFILL), nodes.join("d", DECODE)
    running = nodes.start("r")
    first = TokenEvent(
        request_id="r", index=0, token_ids=[5], cached_tokens=2, times=PhaseTimes(prefill_s=1.0)
    )
    nodes.flow.tokens(TokenBatch(events=[first]), prefill)
    assert journeys == []
    if fails:
        running.cancel("the client is gone")
    else:
        nodes.say(decode, token(1, last=True))
    (found,) = journeys
    (attempt,) = found.attempts
    assert (attempt.prefill_node, attempt.decode_node) == ("p", "d")
    assert attempt.at_prefill == PhaseTimes(prefill_s=1.0)
    assert attempt.token_one_s is not None
    assert (found.num_cached_tokens, found.num_tokens) == (2, 1 if fails else 2)
    assert found.error == ("request_cancelled" if fails else "")


def test_latencies_count_what_the_client_has_waited() -> None:
    one = journey()
    assert one.ttft_s is one.tpot_s is None
    one.sent("p", "d1", 10.5, is_resumed=False)
    one.token_one(0, 12.0)
    assert (one.ttft_s, one.tpot_s) == (2.0, None), "it has not ended"
    one.interrupted("node_lost", 13.0)
    one.sent("p", "d2", 13.5, is_resumed=True)
    one.num_tokens, one.ended_s = 5, 20.0
    assert (one.ttft_s, one.tpot_s) == (2.0, 2.0), "the gap is in the second"
    one.num_tokens = 1
    assert one.tpot_s is None
