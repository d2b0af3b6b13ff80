"""Streams that get several tokens a step leave their places sooner; promises do not count on it."""

from __future__ import annotations

import pytest

from coordinator.routing.loads.paces import StreamPaces
from tests.unit.coordinator.routing.nodes import NO_PROMISE, Nodes

NUM_TOKENS = 2000


def ended(nodes: Nodes, share: float) -> tuple[int, float]:
    """Have a stream that takes this share of the predicted time; buckets it was planned for."""
    booking = nodes.send(100, max_tokens=NUM_TOKENS, slo=NO_PROMISE)
    booking.progressed(1)
    plan, predicted_s = booking.plan, booking.placement.tpot_s
    assert plan is not None
    assert plan.end is not None
    nodes.clock.advance(share * predicted_s * (NUM_TOKENS - 1))
    booking.progressed(NUM_TOKENS)
    booking.end(by_itself=True)
    return plan.end - plan.first, predicted_s


def test_places_are_free_sooner_and_predictions_stay() -> None:
    nodes = Nodes(p=1, d=1)
    planned, predicted_s = ended(nodes, 0.25)
    for _ in range(40):
        sooner, then_s = ended(nodes, 0.25)
    assert sooner == pytest.approx(planned / 4, abs=2)
    assert then_s == predicted_s
    (member,) = nodes.decode
    assert nodes.router.node_outlook(member).pace_share == pytest.approx(0.25, abs=0.02)
    for _ in range(60):
        again, _ = ended(nodes, 1.5)
    assert again == pytest.approx(planned, abs=2)


def test_short_streams_and_unknown_nodes_tell_nothing() -> None:
    paces = StreamPaces()
    paces.observe(3, 7, 1.0, 0.1)
    paces.observe(3, 100, 0.0, 0.1)
    assert paces.share(3) == 1.0
    paces.observe(3, 100, 1.0, 0.0)
    assert 0 < paces.share(3) < 1
    paces.clear(3)
    assert paces.share(3) == 1.0
