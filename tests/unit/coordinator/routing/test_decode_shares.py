"""Predictions count on streams that would give their places to the request: nodes preempt them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.admission import Admission, Admit, WaitingLine
from coordinator.routing import Booking
from coordinator.routing.loads.decode import DecodeShares
from coordinator.routing.loads.prefill import ServiceClass
from pdserve.protocol import Slo
from pdserve.settings.config import Mode
from tests.unit.coordinator.routing.nodes import COSTS, PERF, Nodes

ALICE = Slo(name="standard", tenant="alice", ttft_s=10.0, tpot_s=0.25, priority=1)
EQUAL = Slo(name="standard", tenant="bob", ttft_s=10.0, tpot_s=0.25, priority=1)
ABOVE = Slo(name="interactive", tenant="bob", ttft_s=2.0, tpot_s=0.1, priority=2)
BELOW = Slo(name="batch", tenant="bob", ttft_s=10.0, tpot_s=0.25)
PLACES = PERF.max_batch_size


def flooded(mode: Mode = "disaggregated") -> tuple[Nodes, list[Booking]]:
    """Alice has all places of two decode nodes for some seconds, and as many requests wait."""
    nodes = Nodes(mode, p=1, d=2)
    bookings = []
    for _ in range(4 * PLACES):
        bookings.append(nodes.send(10, max_tokens=300, slo=ALICE))
        nodes.clock.advance(0.02)
        bookings[-1].progressed(1)
    return nodes, bookings


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "adaptive", "multiplexed"])
@pytest.mark.parametrize("slo", [ABOVE, EQUAL], ids=["above", "equal"])
def test_nobody_is_predicted_to_wait_for_those_who_give_way(slo: Slo, mode: Mode) -> None:
    nodes, _ = flooded(mode)
    placement = nodes.place(10, max_tokens=33, slo=slo)
    assert placement.wait_s == 0
    assert placement.tpot_s < 2 * COSTS.knot_s[0] * PLACES
    decision = Admission(WaitingLine[str](1)).decide(slo, placement, nodes.clock.now())
    assert isinstance(decision, Admit)


@pytest.mark.parametrize("slo", [ALICE, BELOW], ids=["own", "below"])
def test_own_requests_and_those_above_are_waited_for(slo: Slo) -> None:
    nodes, _ = flooded()
    placement = nodes.place(10, max_tokens=33, slo=slo)
    assert placement.wait_s > 1


def test_an_equal_is_predicted_to_get_no_more_than_its_share() -> None:
    nodes, _ = flooded()
    waits_s = []
    for _ in range(3 * PLACES):
        booking = nodes.send(10, max_tokens=300, slo=EQUAL)
        booking.progressed(1)
        waits_s.append(booking.placement.wait_s)
    at_once = sum(wait_s == 0 for wait_s in waits_s)
    assert at_once == PLACES, "half of the places of two nodes"


def test_token_1_is_not_held_back_for_those_who_give_way() -> None:
    nodes, _ = flooded()
    for slo, waits in ((ABOVE, False), (BELOW, True)):
        booking = nodes.send(10, max_tokens=33, slo=slo)
        booking.progressed(1)
        assert booking.has_to_wait is waits
        booking.end(by_itself=False)


def test_what_has_ended_gives_no_place() -> None:
    nodes, bookings = flooded()
    for booking in bookings:
        booking.end(by_itself=True)
    decodes, now_s = nodes.router._books.decodes, nodes.clock.now()
    assert decodes.yielding(ServiceClass.of(ABOVE), now_s) is None
    assert decodes.shares._columns == {}


def test_a_lost_node_is_forgotten() -> None:
    nodes, bookings = flooded()
    for member in nodes.decode:
        nodes.registry.remove(member)
    for booking in bookings:
        booking.end(by_itself=False)
    assert nodes.router._books.decodes.shares._columns == {}


@given(
    mine=st.integers(0, 12),
    theirs=st.integers(0, 40),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_equals_give_places_until_both_have_their_shares(
    mine: int, theirs: int, weight: float
) -> None:
    shares, me, they = DecodeShares(), ServiceClass(0, "me", weight), ServiceClass(0, "they", 1.0)
    for service_class, count in ((me, mine), (they, theirs)):
        if count:
            shares.add(3, service_class, count)
    batch = np.zeros(shares.capacity, np.int64)
    batch[3] = mine + theirs
    num_yielding = int(shares.yielding(me, batch, np.full(shares.capacity, 12))[3])
    left = theirs - num_yielding
    assert 0 <= num_yielding <= theirs
    if mine + theirs <= 12:  # it is no flood
        assert num_yielding == 0
    elif mine + left < 12:  # there is a place for one more of mine: they keep theirs
        assert num_yielding == 0 or left >= (mine + 1) / weight > left - 1
    else:
        assert left >= 12 - mine
