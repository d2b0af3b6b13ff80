"""Whether a request that was prefilled finds a place at its decode node."""

from __future__ import annotations

from coordinator.routing import Booking
from pdserve.protocol import Slo
from tests.unit.coordinator_routing.nodes import NO_PROMISE, Nodes

# A decode step takes a millisecond a request: nine stay within nine tenths of this TPOT.
TIGHT = Slo(name="a", ttft_s=10.0, tpot_s=0.010, hold_s=9.0)
NUM_PLACES = 9


def prefilled(nodes: Nodes, slo: Slo = TIGHT) -> Booking:
    booking = nodes.send(100, max_tokens=1000, slo=slo)
    nodes.clock.advance(0.1)  # its prompt
    booking.progressed(1)
    return booking


def decoding(nodes: Nodes, slo: Slo = TIGHT) -> Booking:
    booking = prefilled(nodes, slo)
    booking.progressed(2)
    return booking


def test_a_batch_that_would_be_too_slow_has_no_place() -> None:
    nodes = Nodes(p=1, d=1)
    # By the calendar there is KV for five at a time; those that decode sooner count from then on.
    batch = [decoding(nodes) for _ in range(NUM_PLACES - 1)]
    last = prefilled(nodes)
    assert not last.has_to_wait
    last.progressed(2)
    newcomer = prefilled(nodes)
    assert newcomer.has_to_wait
    for booking in batch[:2]:
        booking.end(by_itself=True)
    assert not newcomer.has_to_wait


def test_nobody_has_to_wait_who_is_alone_or_was_promised_nothing() -> None:
    nodes = Nodes(p=1, d=1)
    hopeless = Slo(name="a", ttft_s=10.0, tpot_s=1e-6, hold_s=9.0)
    assert not prefilled(nodes, hopeless).has_to_wait
    for _ in range(NUM_PLACES + 1):
        assert not decoding(nodes, NO_PROMISE).has_to_wait


def test_others_that_wait_say_that_there_is_no_place() -> None:
    nodes = Nodes(p=1, d=1)
    prefilled(nodes)
    booking = prefilled(nodes)
    assert booking.has_to_wait, "the first one has waited for ten gaps"
