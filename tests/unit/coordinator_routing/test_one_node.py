"""When a node that has streams begins a prompt, and what a long one costs the streams to come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.routing import Booking
from pdserve.protocol import Slo
from tests.unit.coordinator_routing.nodes import Nodes, names, send_to

# A token takes a millisecond. Beside three streams, 6 tokens of a prompt fit within 0.9 of this.
TIGHT = Slo(ttft_s=10.0, tpot_s=0.010)


def with_streams(seconds: float) -> Nodes:
    """A node with three streams that end in `seconds`."""
    nodes = Nodes("colocated", d=1)
    for _ in range(3):
        send_to(nodes, nodes.decode[0], 1, max_tokens=round(seconds * 100)).progressed(1)
    return nodes


def handed_off(nodes: Nodes) -> Booking:
    """A request that is prefilled on the one node and decoded on the other."""
    request = nodes.request(1, max_tokens=200)
    pair = replace(nodes.router.place(request), prefill=nodes.prefill[0], decode=nodes.decode[0])
    return nodes.router.dispatched(request, pair)


def test_a_prompt_waits_for_streams_that_leave_no_time_for_a_chunk() -> None:
    """The forecast is read every 0.8 s, so an end at 2 s is seen at 2.4 s."""
    assert with_streams(2.0).place(100, slo=TIGHT).ttft_s == pytest.approx(2.5, abs=0.01)
    loose = Slo(ttft_s=10.0, tpot_s=0.030)
    assert with_streams(2.0).place(100, slo=loose).ttft_s < 0.2
    assert with_streams(2.0).place(5, slo=TIGHT).ttft_s < 0.02, "all of it fits beside them"


def test_it_does_not_wait_until_its_own_promise_is_broken() -> None:
    """By then streams lend it time: it gets small chunks, in steps longer than promised."""
    urgent = Slo(ttft_s=1.5, tpot_s=0.010)
    assert with_streams(5.0).place(100, slo=urgent).ttft_s == pytest.approx(0.9 * 1.5, abs=0.01)


def test_a_long_prompt_is_not_begun_where_others_will_be_handed_off() -> None:
    """The decode node is idle at the moment, but as a rule it has four streams."""
    nodes = Nodes("adaptive", p=1, d=1)
    decode = nodes.decode[0]

    def computed_by() -> str | None:
        prefill, decode = names(nodes.place(3000, max_tokens=200, slo=TIGHT))
        return prefill or decode

    nodes.send(5500, max_tokens=1)  # the prefill node has something to do for 5.5 s
    assert computed_by() == "d0"
    streams = [handed_off(nodes) for _ in range(4)]
    for stream in streams:
        stream.progressed(1)
        stream.progressed(2)
    for _ in range(60):
        nodes.report(decode)
    for stream in streams:
        stream.end(by_itself=True)
    assert computed_by() == "p0"
    for _ in range(60):
        nodes.report(decode)
    assert computed_by() == "d0", "it has been idle for half a minute"
