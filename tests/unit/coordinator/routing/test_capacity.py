"""Which way would serve more requests, by what the last ones were like."""

from __future__ import annotations

from math import inf
from random import Random
from statistics import fmean

import pytest
from msgspec import structs

from coordinator.routing import capacity
from coordinator.routing.capacity import FEWEST, SAMPLE, NodeCosts, Way, Ways
from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.means import MEMORY, RequestMeans
from pdserve.protocol import NodeRole, Slo, StepCosts
from tests.unit.coordinator.routing.nodes import BATCHES, Nodes

MANY = 10 * MEMORY


def means_of(prompt: int, output: int, tpot_s: float = 0.018, count: int = MANY) -> RequestMeans:
    """Nothing is cached; all prompts are alike."""
    means = RequestMeans(count, count, prompt, prompt**2, prompt, ttft_s=3.0, tpot_s=tpot_s)
    answer(means, prompt, output)
    return means


def answer(means: RequestMeans, prompt: int, output: int) -> None:
    """All answers have had this length."""
    means._answers, means._tokens = MEMORY, MEMORY * output
    means._read = means._tokens * (prompt + output / 2)


def better(nodes: Nodes, ways: Ways) -> Way | None:
    fleet = nodes.router.fleet
    return ways.better(*(fleet.ready(role) for role in (NodeRole.PREFILL, NodeRole.DECODE, None)))


def found(nodes: Nodes, means: RequestMeans) -> Way | None:
    return better(nodes, Ways(nodes.router.fleet, means))


@pytest.mark.parametrize(
    ("tpot_s", "way"),
    [
        (0.018, "apart"),  # steps with many streams have no room for prompts
        (0.022, None),  # neither is clearly better
        (0.04, "together"),  # they have
    ],
)
def test_prompts_and_streams_are_apart_where_they_would_disturb_each_other(
    tpot_s: float, way: Way | None
) -> None:
    assert found(Nodes("adaptive", perf=BATCHES, p=1, d=1), means_of(100, 50, tpot_s)) == way


@pytest.mark.parametrize(
    ("num_decode", "output", "way"),
    [
        (1, 50, "apart"),
        (1, 200, "together"),  # the prefill node would have little to do
        (3, 50, "apart"),
        (8, 50, "together"),  # and here the decode nodes
    ],
)
def test_pools_are_apart_where_their_ratio_fits_the_load(
    num_decode: int, output: int, way: Way
) -> None:
    assert found(Nodes("adaptive", perf=BATCHES, p=1, d=num_decode), means_of(50, output)) == way


def test_without_promises_nothing_is_disturbed() -> None:
    means = means_of(50, 50, tpot_s=inf)
    means.ttft_s = inf
    assert found(Nodes("adaptive", perf=BATCHES, p=1, d=1), means) == "together"


def test_a_way_is_kept_until_the_other_is_clearly_better_twice() -> None:
    nodes = Nodes("adaptive", perf=BATCHES, p=1, d=1)
    means = means_of(100, 50)
    ways = Ways(nodes.router.fleet, means)
    assert better(nodes, ways) == "apart"
    now: list[Way | None] = []
    for output in (70, 200, 50, 200, 200, 70, 70, 50, 70, 50, 50):
        answer(means, 100, output)
        means.num_ended += MANY
        now.append(better(nodes, ways))
    assert now == ["apart"] * 4 + ["together"] * 6 + ["apart"]
    assert found(nodes, means_of(100, 70)) is None


def test_nothing_is_said_after_few_requests_or_of_unknown_nodes() -> None:
    nodes = Nodes("adaptive", perf=BATCHES, p=1, d=1)
    assert found(nodes, means_of(100, 50, count=FEWEST - 1)) is None
    assert found(nodes, means_of(100, 50, count=FEWEST)) == "apart"
    nodes.join("new", NodeRole.DECODE, perf=None)
    assert found(nodes, means_of(100, 50)) is None


def test_means_are_those_of_the_last_requests() -> None:
    nodes, means = Nodes("adaptive", p=1, d=1), RequestMeans()

    def note(prompt: int, slo: Slo, num_output: int) -> None:
        booking = nodes.send(prompt, slo=slo)
        means.began(booking)
        booking.progressed(num_output)
        means.ended(booking)

    note(100, Slo(ttft_s=2.0), 10)
    note(300, Slo(ttft_s=2.0), 30)
    assert (means.prompt, means.ttft_s) == (200, 2.0)
    assert means.tpot_s == inf  # nothing is promised
    assert means.dispersion == pytest.approx(0.25)
    means.update()
    assert means.output == pytest.approx(20, rel=0.01)
    assert means.context == pytest.approx((10 * 105 + 30 * 315) / 40, rel=0.01)
    for _ in range(20):  # they failed, or nobody waited for them
        booking = nodes.send(200, slo=Slo(ttft_s=2.0))
        means.began(booking)
        means.ended(booking)
    means.update()
    assert (means.num_ended, means.output) == (2, pytest.approx(20, rel=0.01))
    means.num_begun = 2
    note(200, Slo(ttft_s=0.5), 20)
    assert means.ttft_s == pytest.approx(1.0)  # tight promises are those that are broken
    for _ in range(4 * MEMORY):
        note(50, Slo(), 5)
    assert means.prompt == pytest.approx(50, rel=0.1)
    means.update()
    assert means.output == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize(
    ("places", "share", "waits"),
    [(64, 0.5, False), (64, 0.95, True), (64, 1.0, True), (10**6, 0.5, False), (10**6, 1.0, True)],
)
def test_streams_wait_where_nearly_all_places_are_taken(
    places: int, share: float, waits: bool
) -> None:
    means = RequestMeans(tpot_s=0.02, ttft_s=0.1, output=100)
    ends_per_s = places / 2
    assert means.waits(share * ends_per_s, ends_per_s, places, 0.02) is waits


def test_answers_are_as_long_as_all_will_be_and_not_as_those_that_ended_first() -> None:
    """Lengths are exponential, and all have begun at once."""
    nodes, means = Nodes("adaptive", p=1, d=1), RequestMeans()
    random = Random(0)
    lengths = sorted(1 + int(random.expovariate(1 / 100)) for _ in range(400))
    bookings = [nodes.send(100) for _ in lengths]
    for booking in bookings:
        means.began(booking)
    for booking, length in zip(bookings[:40], lengths, strict=False):
        booking.progressed(length)
        means.ended(booking)
    for booking in bookings[40:]:
        booking.progressed(lengths[40])
    means.update()
    assert fmean(lengths[:40]) < 10
    assert means.output == pytest.approx(fmean(lengths), rel=0.3)


@pytest.mark.parametrize("each_is_unlike", [False, True])
def test_a_large_fleet_is_looked_at_as_fast_as_a_small_one(
    each_is_unlike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes measure their steps themselves, so no two may have the same costs."""
    looked_at: list[int] = []

    class Counted(NodeCosts):
        def __init__(self, fleet: Fleet, slot: int, means: RequestMeans) -> None:
            looked_at.append(slot)
            super().__init__(fleet, slot, means)

    monkeypatch.setattr(capacity, "NodeCosts", Counted)
    nodes = Nodes("adaptive")
    for number in range(50):
        knot_s = [0.01, 0.112 + 1e-5 * number * each_is_unlike]
        perf = structs.replace(BATCHES, step=StepCosts(knot_tokens=[1, 512], knot_s=knot_s))
        nodes.join(f"p{number}", NodeRole.PREFILL, perf=perf)
        nodes.join(f"d{number}", NodeRole.DECODE, perf=perf)
    assert found(nodes, means_of(100, 50)) == "apart"
    assert len(looked_at) == (3 * SAMPLE if each_is_unlike else 3)
