"""The native arithmetic of a decision, against the performance model and a plain reference."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.routing.loads.decode import BUCKET_S, NUM_BUCKETS, Plan
from coordinator.routing.placement import Newcomer
from pdserve._native import FleetView, cheapest, least
from pdserve.kv import KvLayout
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import NodeRole, PerfReport, StepCosts, TransferCosts
from pdserve.rules.batch import aimed_s
from tests.fakes.hellos import LAYOUT
from tests.unit.coordinator.routing.nodes import NUM_BLOCKS, Nodes
from tests.unit.coordinator.routing.plain_node import PlainNode

# The same examples each time: at a boundary the two may round to different sides of it.
SETTINGS = settings(derandomize=True)
TOKEN_BYTES = LAYOUT.block_bytes / LAYOUT.block_size
WINDOWED = replace(LAYOUT, num_layers=4, windows=(9, 9, 30, 0))


@st.composite
def perf_reports(draw: st.DrawFn) -> PerfReport:
    knots = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True))
    steps = draw(st.lists(st.floats(0.001, 0.1), min_size=len(knots), max_size=len(knots)))
    costs = StepCosts(
        knot_tokens=sorted(knots),
        knot_s=sorted(steps),
        sampled_s=draw(st.floats(0, 0.001)),
        pair_s=draw(st.floats(0, 1e-6)),
        context_s=draw(st.floats(0, 1e-5)),
    )
    pull_s, tier_s = draw(st.floats(0, 0.1)), draw(st.floats(0, 0.1))
    transfers = [
        TransferCosts(transport="shm", fixed_s=pull_s, bytes_per_s=1e6),
        TransferCosts(transport="tier", fixed_s=tier_s, bytes_per_s=2e6),
    ]
    return PerfReport(
        step=costs,
        token_budget=draw(st.integers(1, 256)),
        max_batch_size=draw(st.integers(1, 24)),
        transfers=transfers,
    )


REPORTS = st.lists(perf_reports(), min_size=1, max_size=3)
RATIO = st.floats(0.5, 2)
# A leg joins after so long, lasts so long, and has so much context.
LEGS = st.lists(
    st.tuples(st.floats(0, 26), st.floats(0, 30), st.integers(1, 500)), min_size=0, max_size=30
)


class World:
    """Nodes with these costs, the same legs at each of them, and a newcomer."""

    def __init__(
        self,
        reports: list[PerfReport],
        ratio: float,
        legs: list[tuple[float, float, int]],
        layout: KvLayout = LAYOUT,
    ) -> None:
        self.nodes, self.layout = Nodes(), layout
        for number, perf in enumerate(reports):
            member = self.nodes.join(f"n{number}", NodeRole.PREFILL, perf, layout=layout)
            self.nodes.report(member, prefill_ratio=ratio, decode_ratio=1 / ratio)
        self.reports, self.ratio = reports, ratio
        self.fleet = self.nodes.router.fleet
        self.decodes = self.nodes.router._books.decodes
        self.now_s = self.nodes.clock.now()
        self.plans: list[list[Plan]] = []
        for slot in range(len(reports)):
            times = [(self.now_s + joins, self.now_s + joins + lasts) for joins, lasts, _ in legs]
            self.plans.append(
                [
                    self.decodes.forecast.add(slot, self.now_s, join_s, end_s, context)
                    for (join_s, end_s), (_, _, context) in zip(times, legs, strict=True)
                ]
            )

    def view(self, newcomer: Newcomer, num_yielding: int = 0) -> FleetView:
        yielding = np.full(self.fleet.capacity, num_yielding)
        return newcomer.view(self.fleet, self.decodes, self.now_s, yielding)

    def plain(self, slot: int, newcomer: Newcomer, num_yielding: int = 0) -> PlainNode:
        return PlainNode(
            perf=self.reports[slot],
            prefill_ratio=self.ratio,
            decode_ratio=1 / self.ratio,
            kv_tokens=NUM_BLOCKS * LAYOUT.block_size,
            layout=self.layout,
            plans=self.plans[slot],
            present=int(self.now_s // BUCKET_S),
            context=newcomer.context,
            num_tokens=newcomer.num_tokens,
            limit_s=aimed_s(newcomer.tpot_s),
            num_yielding=num_yielding,
        )

    def empty(self) -> np.ndarray:
        return np.empty(self.fleet.capacity)


@SETTINGS
@given(
    reports=REPORTS,
    ratio=RATIO,
    num_tokens=st.integers(2, 2000),
    hits=st.lists(st.tuples(st.integers(0, 1999), st.integers(0, 1999)), min_size=3, max_size=3),
)
def test_a_prompt_is_computed_loaded_or_pulled_whichever_is_soonest(
    reports: list[PerfReport], ratio: float, num_tokens: int, hits: list[tuple[int, int]]
) -> None:
    world = World(reports, ratio, [])
    hits = [(min(held, num_tokens - 1), in_pool) for held, in_pool in hits[: len(reports)]]
    hits = [(held, min(held, in_pool)) for held, in_pool in hits]
    columns = np.array(hits).T.copy()
    out = world.empty()
    view = world.view(Newcomer(0, 0, 0.0))
    view.prompts(num_tokens, np.arange(len(reports)), columns[0], columns[1], out)
    most = max(held for held, _ in hits)
    for slot, (perf, (held, in_pool)) in enumerate(zip(reports, hits, strict=True)):
        model = PerfModel(perf.step, ratio)
        pull, tier = perf.transfers
        load_s = tier.fixed_s + (held - in_pool) * TOKEN_BYTES / tier.bytes_per_s
        load_s *= held > in_pool
        pulls_s = [
            load_s + pull.fixed_s + (most - held) * TOKEN_BYTES / pull.bytes_per_s,
            pull.fixed_s + (most - in_pool) * TOKEN_BYTES / pull.bytes_per_s,
        ]
        ways_s = [model.prefill_s(num_tokens - in_pool, in_pool, perf.token_budget)]
        if held > in_pool:
            ways_s.append(load_s + model.prefill_s(num_tokens - held, held, perf.token_budget))
        if most > held:
            rest_s = model.prefill_s(num_tokens - most, most, perf.token_budget)
            ways_s.append(min(pulls_s) + rest_s)
        assert out[slot] == pytest.approx(min(ways_s))


@SETTINGS
@given(
    reports=REPORTS,
    num_tokens=st.integers(2, 2000),
    hits=st.lists(st.tuples(st.integers(0, 1999), st.integers(0, 1999)), min_size=3, max_size=3),
    prompt_s=st.floats(0, 1),
    queue_s=st.floats(0, 1),
)
def test_kv_is_pulled_or_brought_up_while_the_prompt_is_computed(
    reports: list[PerfReport],
    num_tokens: int,
    hits: list[tuple[int, int]],
    prompt_s: float,
    queue_s: float,
) -> None:
    world = World(reports, 1.0, [])
    hits = [(min(held, num_tokens - 1), in_pool) for held, in_pool in hits[: len(reports) - 1]]
    hits = [(held, min(held, in_pool)) for held, in_pool in hits]  # the last node holds nothing
    columns = np.array(hits, np.int64).reshape(-1, 2).T.copy()
    out, ttft_s = world.empty(), queue_s + prompt_s
    view = world.view(Newcomer(0, 0, 0.0))
    view.handoffs(num_tokens, np.arange(len(hits)), columns[0], columns[1], prompt_s, ttft_s, out)
    for slot, (perf, (held, in_pool)) in enumerate(zip(reports, [*hits, (0, 0)], strict=True)):
        pull, tier = perf.transfers
        copies_s = (num_tokens - held) * TOKEN_BYTES / pull.bytes_per_s
        expected_s = pull.fixed_s + max(copies_s - prompt_s, 0.0)
        if held > in_pool:
            loads_s = tier.fixed_s + (held - in_pool) * TOKEN_BYTES / tier.bytes_per_s
            expected_s += max(loads_s - ttft_s, 0.0)
        assert out[slot] == pytest.approx(expected_s)


@SETTINGS
@given(
    reports=REPORTS,
    ratio=RATIO,
    legs=LEGS,
    in_s=st.floats(0, 30),
    newcomer=st.builds(
        Newcomer, st.integers(1, 500), st.integers(1, 9000), st.sampled_from([0.0, 0.02, 0.2])
    ),
    layout=st.sampled_from([LAYOUT, WINDOWED, replace(LAYOUT, state_bytes=9000)]),
)
def test_paces_and_places_are_those_of_the_batches_to_come(
    reports: list[PerfReport],
    ratio: float,
    legs: list[tuple[float, float, int]],
    in_s: float,
    newcomer: Newcomer,
    layout: KvLayout,
) -> None:
    world = World(reports, ratio, legs, layout)
    view, out = world.view(newcomer), world.empty()
    view.paces(in_s, 1000.0, out)
    bucket = int((world.now_s + in_s) // BUCKET_S)
    ahead = min(bucket - int(world.now_s // BUCKET_S), NUM_BUCKETS - 1)
    for slot in range(len(reports)):
        plain = world.plain(slot, newcomer)
        assert view.has_place(slot) is plain.has_place(0)
        full_s = 0.0 if plain.has_place(ahead) else 1000.0
        assert out[slot] == pytest.approx(plain.with_s(ahead) + full_s)
    assert view.place(0, in_s) == pytest.approx(world.plain(0, newcomer).place(in_s))


def test_a_node_has_room_for_what_windows_leave() -> None:
    """Of a long request the layers with windows hold the last tokens only."""
    perf = PerfReport(
        step=StepCosts(knot_tokens=[1], knot_s=[0.01]), token_budget=64, max_batch_size=8
    )
    legs = [(0.0, 30.0, 5000)]
    newcomer = Newcomer(3000, 5000, 0.0)
    assert not World([perf], 1.0, legs).view(newcomer).has_place(0)  # 4,000 tokens fit
    assert World([perf], 1.0, legs, WINDOWED).view(newcomer).has_place(0)
    assert not World([perf], 1.0, legs, WINDOWED).view(Newcomer(3000, 11000, 0.0)).has_place(0)


@SETTINGS
@given(reports=REPORTS, legs=LEGS, num_yielding=st.integers(1, 10))
def test_requests_that_give_their_places_are_not_waited_for(
    reports: list[PerfReport], legs: list[tuple[float, float, int]], num_yielding: int
) -> None:
    """The step is as short as the least number of them makes it, or as its limit."""
    world, newcomer = World(reports, 1.0, legs), Newcomer(50, 100, 0.05)
    view, out = world.view(newcomer, num_yielding), world.empty()
    view.paces(0.0, 1000.0, out)
    for slot in range(len(reports)):
        step_s, has_place = world.plain(slot, newcomer, num_yielding).joining(0)
        assert bool(out[slot] < 1000.0) is has_place
        assert out[slot] >= step_s - 1e-9
        if has_place and out[slot] != pytest.approx(step_s, abs=1e-6):
            assert out[slot] <= newcomer.tpot_s * 0.9 + 1e-9


@SETTINGS
@given(reports=REPORTS, legs=LEGS, tpot_s=st.floats(0.001, 0.1))
def test_when_a_pace_is_kept_is_looked_for_at_every_node(
    reports: list[PerfReport], legs: list[tuple[float, float, int]], tpot_s: float
) -> None:
    world, newcomer = World(reports, 1.0, legs), Newcomer(10, 10, 0.0)
    plain = [world.plain(slot, newcomer) for slot in range(len(reports))]
    moments = [
        ahead
        for ahead in range(0, NUM_BUCKETS, 8)
        if any(node.has_place(ahead) and node.with_s(ahead) <= tpot_s for node in plain)
    ]
    found = world.view(newcomer).within(np.arange(len(reports)), tpot_s)
    assert found == (pytest.approx(moments[0] * BUCKET_S) if moments else None)


@SETTINGS
@given(
    reports=REPORTS,
    ratio=RATIO,
    legs=LEGS,
    queue_s=st.floats(0, 10),
    prompt_s=st.floats(0.001, 10),
    num_prompts=st.integers(0, 3),
    tpot_s=st.sampled_from([0.0, 0.02, 0.2]),
    output_tokens=st.integers(1, 500),
)
def test_a_prompt_beside_streams_ends_when_its_chunks_are_done(
    reports: list[PerfReport],
    ratio: float,
    legs: list[tuple[float, float, int]],
    queue_s: float,
    prompt_s: float,
    num_prompts: int,
    tpot_s: float,
    output_tokens: int,
) -> None:
    world, newcomer = World(reports, ratio, legs), Newcomer(100, 200, tpot_s)
    slots, n = np.arange(len(reports)), world.fleet.capacity
    queues, prompts = np.full(n, queue_s), np.full(n, prompt_s)
    out = np.empty((7, len(slots)))
    world.view(newcomer).on_one_node(
        slots, queues, prompts, np.full(n, num_prompts), 10.0, tpot_s or 0.25, output_tokens, out
    )
    for slot in slots.tolist():
        begins_s, ttft_s, pace_s, stalled_s, harm = out[:5, slot].tolist()
        is_full, crowds = out[5:, slot].tolist()
        plain = world.plain(slot, newcomer)
        assert begins_s == pytest.approx(plain.takes_s(queue_s))
        moment = min(int(begins_s / (8 * BUCKET_S)), NUM_BUCKETS // 8 - 1)
        rows, context = plain.streams(moment)
        chunk = plain.chunk(rows, context)
        step_s = plain.mixed_s(rows, context, chunk)
        at_least_s = begins_s + min(step_s, prompt_s + plain.mixed_s(rows, context, 0))
        assert ttft_s == pytest.approx(max(plain.takes_s(queue_s + prompt_s), at_least_s))
        ahead = min(int((world.now_s + ttft_s) // BUCKET_S) - plain.present, NUM_BUCKETS - 1)
        with_s = plain.with_s(ahead)
        assert bool(is_full) == (not plain.has_place(ahead))
        stall_s = max(step_s - with_s, 0.0) if rows else 0.0
        share = min(begins_s / step_s / output_tokens, 1.0)
        assert stalled_s == pytest.approx(share * stall_s)
        assert pace_s == pytest.approx(with_s + share * stall_s)
        ends_s = ttft_s + output_tokens * pace_s
        until = min(int((world.now_s + ends_s) // BUCKET_S) - plain.present, NUM_BUCKETS - 1)
        assert bool(crowds) != all(plain.has_place(at) for at in range(ahead, until + 1, 8))
        num_steps = prompt_s / plain.alone_s(chunk)
        waits = rows * stall_s * num_steps / output_tokens / (tpot_s or 0.25)
        if num_prompts:
            slower = plain.speed(min(rows + 1, plain.perf.max_batch_size - 1), context + 100)
            lost_s = max(plain.speed(rows, context) - slower, 0.0) * output_tokens
            lost_s *= max(with_s, 0.9 * tpot_s)
            waits += num_prompts * min(10.0 / max(queue_s, 1e-9), 1.0) * lost_s / 10.0
        assert harm == pytest.approx(waits, abs=1e-9)


@SETTINGS
@given(
    costs=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=40),
    most=st.integers(0, 50),
)
def test_the_least_are_found_and_of_equals_the_first(costs: list[float], most: int) -> None:
    expected = sorted(range(len(costs)), key=lambda slot: (costs[slot], slot))[:most]
    assert least(np.array(costs), np.arange(len(costs)), most) == sorted(expected)


@SETTINGS
@given(
    costs=st.lists(st.floats(0, 3), min_size=1, max_size=20),
    loads=st.lists(st.integers(0, 2), min_size=20, max_size=20),
)
def test_the_cheapest_are_as_good_as_the_least_and_have_the_least_to_do(
    costs: list[float], loads: list[int]
) -> None:
    good = [slot for slot, cost in enumerate(costs) if cost <= min(costs) * 1.1]
    least_load = min(loads[slot] for slot in good)
    found = cheapest(np.array(costs), np.array(loads), np.arange(len(costs)), 0.1)
    assert found == [slot for slot in good if loads[slot] == least_load]


def test_what_would_read_or_write_elsewhere_is_refused() -> None:
    world = World([PerfReport(step=StepCosts([1], [0.1]), token_budget=8, max_batch_size=4)], 1, [])
    view, out, n = world.view(Newcomer(1, 1, 0.0)), world.empty(), world.fleet.capacity
    slots, beyond, none = np.array([0]), np.array([n]), np.array([0])
    with pytest.raises(ValueError, match=f"slots: expected below {n}, found {n}"):
        view.prompts(10, beyond, none, none, out)
    with pytest.raises(ValueError, match="held: expected 0 <= in_pool <= held < 10, found 0, 10"):
        view.prompts(10, slots, np.array([10]), none, out)
    with pytest.raises(ValueError, match=f"slots: expected below {n}, found {n}"):
        view.handoffs(10, beyond, none, none, 0.0, 0.0, out)
    with pytest.raises(ValueError, match="held: expected 0 <= in_pool <= held < 10, found 3, 2"):
        view.handoffs(10, slots, np.array([2]), np.array([3]), 0.0, 0.0, out)
    with pytest.raises(ValueError, match=f"out: expected {n} elements"):
        view.paces(0.0, 0.0, np.empty(3))
    with pytest.raises(TypeError, match="out: expected 1 axes of float64, found 1 of f"):
        view.paces(0.0, 0.0, np.empty(n, np.float32))
    with pytest.raises(TypeError, match="out: expected a contiguous array"):
        view.paces(0.0, 0.0, np.empty(2 * n)[::2])
    with pytest.raises(ValueError, match=f"slots: expected below {n}, found -1"):
        view.place(-1, 0.0)
    with pytest.raises(ValueError, match=f"slots: expected below {n}, found {n}"):
        view.has_place(n)
    with pytest.raises(ValueError, match="slots: expected below 1"):
        least(np.zeros(1), np.array([1]), 1)
    with pytest.raises(ValueError, match="slots: expected below 1, found -1"):
        cheapest(np.zeros(1), np.array([0]), np.array([-1]), 0.1)
    with pytest.raises(ValueError, match="num_tokens: expected 0 or more, found -1"):
        view.prompts(-1, np.array([], np.int64), *2 * [np.array([], np.int64)], out)
    world.decodes.forecast.bucket_s = 0.0
    with pytest.raises(ValueError, match="the calendar: expected buckets of some seconds"):
        world.view(Newcomer(1, 1, 0.0))
    world.decodes.forecast.bucket_s = BUCKET_S
    world.fleet.row[0] = 7
    with pytest.raises(ValueError, match=r"row\[0\]: expected one that is tabulated, found 7"):
        world.view(Newcomer(1, 1, 0.0))


def test_what_is_no_number_and_what_never_comes_are_looked_up_nowhere_else() -> None:
    world = World([PerfReport(step=StepCosts([1], [0.1]), token_budget=8, max_batch_size=4)], 1, [])
    view = world.view(Newcomer(1, 1, 0.0))
    assert view.place(0, nan) == view.place(0, -5.0) == view.place(0, 0.0)
    assert view.place(0, inf) == (0.0, pytest.approx(0.1))
    pace_s = world.empty()
    for in_s in (nan, inf, -inf):
        view.paces(in_s, 0.0, pace_s)
        assert pace_s[0] == pytest.approx(0.1)
    outcome = np.full((7, 1), -1.0)
    slots, none = np.array([0]), np.zeros(world.fleet.capacity, np.int64)
    for queue_s in (nan, inf):
        queues_s = np.full(world.fleet.capacity, queue_s)
        view.on_one_node(slots, queues_s, world.empty(), none, 1.0, 1.0, 1, outcome)
        assert not outcome[1, 0] < inf
    world.decodes.forecast.requests -= 3  # more have ended than have begun
    world.view(Newcomer(1, 1, 0.0)).paces(0.0, 0.0, pace_s)
    assert pace_s[0] == 0.0
    costs = np.array([nan, 3.0, nan, 1.0] * 20)
    assert least(costs, np.arange(80), 21) == [1, *range(3, 80, 4)]
