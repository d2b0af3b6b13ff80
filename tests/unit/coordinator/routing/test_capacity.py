"""Which way would serve more requests, by what the last ones were like."""

from __future__ import annotations

import pytest
from msgspec import structs

from coordinator.routing import capacity
from coordinator.routing.capacity import FEWEST, SAMPLE, NodeCosts, Way, Ways
from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.means import MEMORY, RequestMeans
from pdserve.protocol import NodeRole, Slo, StepCosts
from tests.unit.coordinator.routing.nodes import PERF, Nodes

MANY = 10 * MEMORY


def means_of(prompt: int, output: int, tpot_s: float = 0.02, count: int = MANY) -> RequestMeans:
    """Nothing is cached; all prompts are alike."""
    return RequestMeans(count, prompt, prompt**2, prompt, output, ttft_s=3.0, tpot_s=tpot_s)


def better(nodes: Nodes, ways: Ways) -> Way | None:
    fleet = nodes.router.fleet
    return ways.better(*(fleet.ready(role) for role in (NodeRole.PREFILL, NodeRole.DECODE, None)))


def found(nodes: Nodes, means: RequestMeans) -> Way | None:
    return better(nodes, Ways(nodes.router.fleet, means))


@pytest.mark.parametrize(
    ("prompt", "output", "way"),
    [
        (400, 10, "together"),  # the decode node has little to do
        (5, 500, "together"),  # and here the prefill node
        (400, 500, "apart"),  # as much as each other
        (50, 100, None),  # neither is clearly better
    ],
)
def test_pools_are_apart_where_both_have_much_to_do(
    prompt: int, output: int, way: Way | None
) -> None:
    assert found(Nodes("adaptive", p=1, d=1), means_of(prompt, output)) == way


@pytest.mark.parametrize(("num_decode", "way"), [(1, "together"), (4, "apart"), (8, "together")])
def test_pools_are_apart_where_their_ratio_fits_the_load(num_decode: int, way: Way) -> None:
    assert found(Nodes("adaptive", p=1, d=num_decode), means_of(50, 200)) == way


def test_a_way_is_kept_until_the_other_is_clearly_better_twice() -> None:
    nodes = Nodes("adaptive", p=1, d=1)
    means = means_of(400, 500)
    ways = Ways(nodes.router.fleet, means)
    assert better(nodes, ways) == "apart"
    now: list[Way | None] = []
    for output in (250, 10, 500, 10, 10, 250, 250, 500, 250, 500, 500):
        means.output, means.count = output, means.count + MANY
        now.append(better(nodes, ways))
    assert now == ["apart"] * 4 + ["together"] * 6 + ["apart"]
    assert found(nodes, means_of(400, 250)) is None


def test_nothing_is_said_after_few_requests_or_of_unknown_nodes() -> None:
    nodes = Nodes("adaptive", p=1, d=1)
    assert found(nodes, means_of(400, 500, count=FEWEST - 1)) is None
    assert found(nodes, means_of(400, 500, count=FEWEST)) == "apart"
    nodes.join("new", NodeRole.DECODE, perf=None)
    assert found(nodes, means_of(400, 500)) is None


def test_means_are_those_of_the_last_requests() -> None:
    nodes, means = Nodes("adaptive", p=1, d=1), RequestMeans()
    for prompt, output in ((100, 10), (300, 30)):
        means.note(nodes.place(prompt, slo=Slo(ttft_s=2.0)), Slo(ttft_s=2.0), output)
    assert (means.prompt, means.output, means.ttft_s) == (200, 20, 2.0)
    assert means.tpot_s == pytest.approx(0.25)  # usual, where nothing is promised
    assert means.dispersion == pytest.approx(0.25)
    means.note(nodes.place(200), Slo(ttft_s=0.5), 20)
    assert means.ttft_s == pytest.approx(1.0)  # tight promises are those that are broken
    for _ in range(4 * MEMORY):
        means.note(nodes.place(50), Slo(), 5)
    assert means.prompt == pytest.approx(50, rel=0.1)


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
        knot_s = [0.001, 0.1 + 1e-5 * number * each_is_unlike]
        perf = structs.replace(PERF, step=StepCosts(knot_tokens=[1, 100], knot_s=knot_s))
        nodes.join(f"p{number}", NodeRole.PREFILL, perf=perf)
        nodes.join(f"d{number}", NodeRole.DECODE, perf=perf)
    assert found(nodes, means_of(400, 500)) == "apart"
    assert len(looked_at) == (3 * SAMPLE if each_is_unlike else 3)
