"""Whether a request that was prefilled finds a place at its decode node."""

from __future__ import annotations

import pytest

from coordinator.routing import Booking
from pdserve.protocol import Slo
from tests.unit.coordinator.routing.nodes import NO_PROMISE, PERF, Nodes

# A decode step takes a millisecond a request: nine stay within nine tenths of this TPOT.
TIGHT = Slo(name="a", ttft_s=10.0, tpot_s=0.010, hold_s=9.0)
NUM_PLACES = 9
LOOSE = Slo(name="a", ttft_s=10.0, tpot_s=1.0, hold_s=9.0)
LONG = 1000  # tokens; with prompts of 100, there is KV for five such requests at a time


def prefilled(nodes: Nodes, slo: Slo = TIGHT, max_tokens: int = 300) -> Booking:
    booking = nodes.send(100, max_tokens=max_tokens, slo=slo)
    booking.progressed(1)
    return booking


def decoding(nodes: Nodes, slo: Slo = TIGHT, max_tokens: int = 300) -> Booking:
    booking = prefilled(nodes, slo, max_tokens)
    booking.progressed(2)
    return booking


@pytest.mark.parametrize(
    ("slo", "max_tokens", "most"),
    [
        pytest.param(TIGHT, 300, NUM_PLACES, id="steps would be too slow"),
        pytest.param(LOOSE, LONG, 5, id="no KV is left"),
        pytest.param(LOOSE, 300, PERF.max_batch_size, id="no row is left"),
    ],
)
def test_a_batch_may_have_no_place_for_one_more(slo: Slo, max_tokens: int, most: int) -> None:
    nodes = Nodes(p=1, d=1)
    batch = [decoding(nodes, slo, max_tokens) for _ in range(most - 1)]
    last = prefilled(nodes, slo, max_tokens)
    assert not last.has_to_wait
    last.progressed(2)
    newcomer = prefilled(nodes, slo, max_tokens)
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
    nodes.clock.advance(0.1)
    booking = prefilled(nodes)
    assert booking.has_to_wait, "the first one has waited for ten gaps"
