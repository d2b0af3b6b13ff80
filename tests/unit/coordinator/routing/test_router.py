"""Where requests go, and what is predicted of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from msgspec import structs

from coordinator.nodes.registry import Member
from coordinator.routing import Booking
from coordinator.routing.capacity import FEWEST
from pdserve.measured.perf_model import PerfModel
from pdserve.protocol import KvTier, NodeRole, NodeState, PerfReport, Slo, TransferCosts
from pdserve.shared.errors import NoNodeAvailable
from tests.fakes.hellos import LAYOUT
from tests.unit.coordinator.routing.nodes import (
    BATCHES,
    COSTS,
    PERF,
    Nodes,
    names,
    send_to,
)

MS = 0.001
PROMPT = list(range(1000, 1200))  # two hundred tokens
MODEL = PerfModel(COSTS)


# ---- TTFT --------------------------------------------------------------------------------------


def test_an_idle_pair_is_predicted_by_the_model() -> None:
    placement = Nodes(p=1, d=1).place(PROMPT)
    assert placement.ttft_s == pytest.approx(MODEL.prefill_s(200, 0, PERF.token_budget))
    assert placement.idle_ttft_s == placement.ttft_s
    assert placement.queue_s == 0
    assert placement.uncached_tokens == 200
    assert placement.tpot_s == pytest.approx(placement.idle_tpot_s)


def test_prompts_go_where_they_are_done_first() -> None:
    nodes = Nodes(p=2, d=1)
    nodes.send(150)
    assert names(nodes.place())[0] == "p1"
    nodes.send(300)
    placement = nodes.place(100)
    assert names(placement)[0] == "p0"
    assert placement.ttft_s == pytest.approx(250 * MS)


def test_a_slower_node_gets_less() -> None:
    nodes = Nodes(p=2, d=1)
    nodes.report(nodes.prefill[0], prefill_ratio=3.0)
    nodes.send(150)  # to the faster one
    assert names(nodes.place(100))[0] == "p1"  # 250 ms there, 300 ms here
    nodes.send(100)
    assert names(nodes.place(100))[0] == "p0"


def test_a_node_that_has_done_nothing_yet_is_taken_to_be_like_its_equals() -> None:
    nodes = Nodes(p=2, d=1)
    nodes.report(nodes.prefill[0], prefill_ratio=3.0)
    nodes.report(nodes.prefill[1])
    expected = 3 * MODEL.prefill_s(200, 0, PERF.token_budget)
    assert nodes.place(PROMPT).ttft_s == pytest.approx(expected)
    assert nodes.place(PROMPT).ttft_s == pytest.approx(expected)


def test_equals_take_turns() -> None:
    nodes = Nodes(p=3, d=1)
    assert {names(nodes.place())[0] for _ in range(3)} == {"p0", "p1", "p2"}


def test_a_cached_prefix_is_worth_a_queue_but_not_any_queue() -> None:
    nodes = Nodes(p=2, d=1)
    no_pulls = PerfReport(
        step=COSTS,
        token_budget=100,
        max_batch_size=10,
        transfers=[TransferCosts(transport="shm", fixed_s=9.0, bytes_per_s=1e9)],
    )
    for member in nodes.prefill:
        nodes.registry.profiled(member, no_pulls)
    nodes.holds(nodes.prefill[0], PROMPT[:160])
    placement = nodes.place(PROMPT)
    assert names(placement)[0] == "p0"
    assert placement.uncached_tokens == 40
    assert placement.ttft_s == pytest.approx(40 * MS)
    nodes.report(nodes.prefill[0], queued_tokens=200)
    assert names(nodes.place(PROMPT))[0] == "p1"


@pytest.mark.parametrize(("fixed_s", "expected_s"), [(0.010, 0.050), (5.0, 0.200)])
def test_a_prefix_of_another_node_is_pulled_if_that_is_sooner(
    fixed_s: float, expected_s: float
) -> None:
    nodes = Nodes(p=1, d=1)
    pulls = [TransferCosts(transport="shm", fixed_s=fixed_s, bytes_per_s=1e12)]
    perf = PerfReport(step=COSTS, token_budget=100, max_batch_size=10, transfers=pulls)
    nodes.registry.profiled(nodes.prefill[0], perf)
    nodes.holds(nodes.decode[0], PROMPT[:160])
    assert nodes.place(PROMPT).ttft_s == pytest.approx(expected_s, rel=1e-3)


def test_the_host_tier_costs_a_load() -> None:
    nodes = Nodes(p=1, d=1)
    costs = [
        TransferCosts(transport="shm", fixed_s=9.0, bytes_per_s=1e9),
        TransferCosts(transport="tier", fixed_s=0.030, bytes_per_s=1e12),
    ]
    perf = PerfReport(step=COSTS, token_budget=100, max_batch_size=10, transfers=costs)
    nodes.registry.profiled(nodes.prefill[0], perf)
    nodes.holds(nodes.prefill[0], PROMPT[:80])
    nodes.holds(nodes.prefill[0], PROMPT[:160], KvTier.HOST)
    assert nodes.place(PROMPT).ttft_s == pytest.approx(0.070, rel=1e-3)


def test_the_last_block_of_a_prompt_is_computed_in_any_case() -> None:
    nodes = Nodes(p=1, d=1)
    nodes.holds(nodes.prefill[0], PROMPT)
    placement = nodes.place(PROMPT)
    assert placement.uncached_tokens == LAYOUT.block_size
    assert placement.ttft_s == pytest.approx(LAYOUT.block_size * MS)


# ---- TPOT --------------------------------------------------------------------------------------


def test_streams_go_where_they_are_fastest_when_they_arrive() -> None:
    nodes = Nodes(p=1, d=2)
    for _ in range(3):
        nodes.send(10)
    assert nodes.place(10).tpot_s > nodes.place(10).idle_tpot_s
    first = [nodes.send(10).placement for _ in range(3)]
    assert {names(placement)[1] for placement in first} == {"d0", "d1"}


def test_the_handoff_is_part_of_the_gaps() -> None:
    nodes = Nodes(p=1, d=1)
    pulls = [TransferCosts(transport="shm", fixed_s=0.050, bytes_per_s=1e12)]
    perf = PerfReport(step=COSTS, token_budget=100, max_batch_size=10, transfers=pulls)
    nodes.registry.profiled(nodes.decode[0], perf)
    placement = nodes.place(PROMPT, max_tokens=11)
    assert placement.tpot_s == pytest.approx(1 * MS + 0.050 / 10, rel=1e-3)


def test_it_is_the_batch_at_token_one_that_counts_and_not_the_one_of_now() -> None:
    """Mooncake's trap: one node is busy now and idle then, the other the other way round."""
    nodes = Nodes(p=2, d=2)
    busy, idle = nodes.decode
    for _ in range(6):
        send_to(nodes, busy, 2, max_tokens=20).progressed(1)
    for _ in range(4):
        send_to(nodes, idle, 800, max_tokens=1000)
    assert nodes.router.node_outlook(busy).tpot_s > nodes.router.node_outlook(idle).tpot_s
    assert nodes.place(10, max_tokens=50, priority=1).decode is idle
    assert nodes.place(10, max_tokens=50).decode is busy  # behind the prompts in the queue


def test_the_pools_do_not_oscillate() -> None:
    """A request every 50 ms, two seconds of prefill, one of decoding: batches stay even.

    Whoever goes by the batches of now sends two seconds' worth of requests to the same node.
    """

    def swing(choose: Callable[[Nodes], Member]) -> int:
        nodes = Nodes(p=60, d=2)
        in_flight: list[tuple[float, Booking]] = []
        batches: dict[str, list[Booking]] = {member.node_id: [] for member in nodes.decode}
        widest = 0
        for tick in range(200):
            now_s = nodes.clock.now()
            for sent_s, booking in list(in_flight):
                decode = booking.placement.decode
                assert decode is not None
                if booking.num_tokens == 0 and now_s - sent_s >= 2.0:
                    booking.progressed(1)
                    batches[decode.node_id].append(booking)
                if now_s - sent_s >= 3.0:
                    booking.end(by_itself=True)
                    batches[decode.node_id].remove(booking)
                    in_flight.remove((sent_s, booking))
            for member in nodes.decode:
                nodes.report(member, running_requests=len(batches[member.node_id]))
            in_flight.append((now_s, send_to(nodes, choose(nodes), 2000, max_tokens=100)))
            nodes.clock.advance(0.050)
            if tick > 60:
                first, second = batches.values()
                widest = max(widest, abs(len(first) - len(second)))
        return widest

    def by_forecast(nodes: Nodes) -> Member:
        decode = nodes.place(2000, max_tokens=100).decode
        assert decode is not None
        return decode

    def by_now(nodes: Nodes) -> Member:
        return min(nodes.decode, key=lambda member: member.load.running_requests)

    assert swing(by_forecast) <= 2
    assert swing(by_now) >= 15


def test_a_leg_that_takes_longer_than_planned_is_planned_anew() -> None:
    nodes = Nodes(p=1, d=1)
    booking = nodes.send(10, max_tokens=100)
    booking.progressed(1)
    for num_tokens in range(2, 60):
        nodes.clock.advance(0.5)
        booking.progressed(num_tokens)
        assert nodes.router.node_outlook(nodes.decode[0]).tpot_s == pytest.approx(2 * MS)
    booking.end(by_itself=True)
    assert nodes.router.node_outlook(nodes.decode[0]).tpot_s == pytest.approx(1 * MS)


def test_a_node_without_room_for_the_kv_is_passed_over_or_waited_for() -> None:
    nodes = Nodes(p=1, d=2)
    nodes.report(nodes.decode[0], running_requests=1, free_blocks=10)
    nodes.report(nodes.decode[1], running_requests=8)
    assert names(nodes.place(PROMPT))[1] == "d1"
    nodes.report(nodes.decode[1], running_requests=8, free_blocks=10)
    placement = nodes.place(PROMPT, max_tokens=11)
    assert placement.tpot_s > 1.0  # the wait falls between tokens 1 and 2


def test_who_waits_for_a_place_is_not_in_the_batch_meanwhile() -> None:
    nodes = Nodes(p=1, d=1)
    for _ in range(10):  # the largest batch
        nodes.send(2, max_tokens=201).progressed(1)
    waiting = nodes.send(2, max_tokens=901)
    waiting.progressed(1)
    wait_s, now_s = waiting.placement.wait_s, nodes.clock.now()
    assert wait_s > 0.1

    def in_batch(in_s: float) -> int:
        batch = nodes.router._books.decodes.at(now_s, now_s + in_s)
        return int(batch.requests[nodes.decode[0].slot])

    assert in_batch(0.0) == 10
    assert in_batch(5.0) == 1


def test_when_a_pace_is_kept_again_is_foreseen() -> None:
    nodes = Nodes(p=1, d=1)
    bookings = [nodes.send(10, max_tokens=1000) for _ in range(5)]
    for booking in bookings:
        booking.progressed(1)
    placement = nodes.place(10)
    assert placement.tpot_s > 5 * MS
    assert nodes.router.tpot_within_s(placement, 10 * MS) == 0
    within_s = nodes.router.tpot_within_s(placement, 2 * MS)
    assert within_s is not None
    assert 2 < within_s < 8
    assert nodes.router.tpot_within_s(placement, 0.1 * MS) is None


# ---- who there is ------------------------------------------------------------------------------


def test_a_single_token_needs_no_decode_node() -> None:
    placement = Nodes(p=1).place(max_tokens=1)
    assert names(placement) == ("p0", None)
    assert (placement.tpot_s, placement.side) == (0.0, "prefill")


@pytest.mark.parametrize("missing", list(NodeRole))
def test_an_empty_pool_is_named(missing: NodeRole) -> None:
    nodes = Nodes(p=1, d=1)
    for member in (*nodes.prefill, *nodes.decode):
        if member.role is missing:
            nodes.report(member, state=NodeState.LOADING)
    assert not nodes.router.can_route()
    with pytest.raises(NoNodeAvailable, match=rf"no {missing.name.lower()} .* \(1 attached\)"):
        nodes.place()


def test_a_node_that_turns_is_in_the_other_pool() -> None:
    nodes = Nodes(p=2, d=1)
    nodes.report(nodes.prefill[0], role=NodeRole.DECODE)
    placements = [nodes.send().placement for _ in range(2)]
    assert {names(placement)[0] for placement in placements} == {"p1"}
    assert {names(placement)[1] for placement in placements} == {"p0", "d0"}


def test_of_nodes_that_have_not_said_what_they_can_do_nothing_is_predicted() -> None:
    nodes = Nodes(d=1)
    nodes.join("new", NodeRole.PREFILL, perf=None)
    placement = nodes.place()
    assert names(placement) == ("new", "d0")
    assert placement.ttft_s == placement.tpot_s == placement.idle_ttft_s == 0
    nodes.send(100)
    nodes.send(100)


def test_more_members_than_there_was_room_for() -> None:
    nodes = Nodes(p=100, d=100)
    bookings = [nodes.send() for _ in range(100)]
    assert {names(b.placement)[0] for b in bookings} == {f"p{i}" for i in range(100)}
    assert {names(b.placement)[1] for b in bookings} == {f"d{i}" for i in range(100)}


# ---- sides -------------------------------------------------------------------------------------

INTERACTIVE = Slo(ttft_s=1.0, tpot_s=0.020)


def test_colocated_requests_stay_on_one_node() -> None:
    nodes = Nodes("colocated", d=2)
    first, second = nodes.send(100).placement, nodes.send(100).placement
    assert {names(first), names(second)} == {(None, "d0"), (None, "d1")}
    assert first.ttft_s == pytest.approx(100 * MS)
    assert nodes.place(100).queue_s > 0


def test_local_chunks_are_as_small_as_the_streams_need_them() -> None:
    nodes = Nodes("colocated", d=1)
    for _ in range(9):
        nodes.send(1, max_tokens=800, slo=Slo(tpot_s=1.0)).progressed(1)
    loose = nodes.place(300)
    tight = nodes.place(300, slo=Slo(tpot_s=0.025))
    # Of each step, 13 of 22 tokens are the prompt's, and not 91 of 100.
    assert tight.ttft_s == pytest.approx(300 * MS * (16 + 9) / 16, rel=0.02)
    assert loose.ttft_s == pytest.approx(300 * MS * 100 / 91, rel=0.02)
    assert tight.tpot_s == pytest.approx(loose.tpot_s), "its own chunks are over by then"
    nodes.send(300)  # and others may come, as this one did
    assert nodes.place(300, slo=Slo(tpot_s=0.025)).tpot_s < nodes.place(300).tpot_s


def test_side_by_side_prompts_wait_for_prompts_and_streams_for_streams() -> None:
    nodes = Nodes("multiplexed", d=2)
    for _ in range(6):
        send_to(nodes, nodes.decode[0], 1, max_tokens=800).progressed(1)
    assert names(nodes.place(300)) == (None, "d1")
    for _ in range(2):
        request = nodes.request(300)
        placement = structs.replace(nodes.router.place(request), decode=nodes.decode[1])
        nodes.router.dispatched(request, placement)
    first = nodes.place(300, slo=Slo(ttft_s=0.5, tpot_s=1.0))
    assert names(first) == (None, "d0"), "its streams do not make prompts late"
    assert first.ttft_s == pytest.approx(300 * MS)
    assert first.tpot_s == pytest.approx(7 * MS), "nor do prompts its streams"


def test_a_place_beside_streams_is_waited_for_before_token_one() -> None:
    nodes = Nodes("multiplexed", d=1)
    fill(nodes)
    placement = nodes.place(10, max_tokens=101)
    assert placement.ttft_s == pytest.approx(2.0, abs=0.2)
    assert placement.tpot_s < 1.5 * MS
    assert nodes.place(10, max_tokens=1).ttft_s == pytest.approx(10 * MS), "it needs no place"


def test_adaptive_keeps_what_is_cached_and_passes_on_what_is_long() -> None:
    nodes = Nodes("adaptive", p=1, d=1)
    for _ in range(5):
        nodes.send(1, max_tokens=1000, slo=INTERACTIVE).progressed(1)
    no_pulls = PerfReport(
        step=COSTS,
        token_budget=100,
        max_batch_size=10,
        transfers=[TransferCosts(transport="shm", fixed_s=0.02, bytes_per_s=1e5)],
    )
    nodes.registry.profiled(nodes.prefill[0], no_pulls)
    nodes.holds(nodes.decode[0], PROMPT[:196])
    assert nodes.place(PROMPT, slo=INTERACTIVE).side == "local"
    assert nodes.place(800, slo=INTERACTIVE).side == "pair"


def test_adaptive_passes_on_what_would_hold_streams_up() -> None:
    """Where there are none, a handoff only costs time."""
    nodes = Nodes("adaptive", p=1, d=1)
    slo = Slo(ttft_s=10.0, tpot_s=0.016)
    assert nodes.place(60, slo=slo).side == "local"
    for member in nodes.decode + nodes.prefill:
        for _ in range(3):
            send_to(nodes, member, 1, max_tokens=1000).progressed(1)
    assert nodes.place(60, slo=slo).side == "pair"


def test_adaptive_uses_the_pool_that_has_slack() -> None:
    nodes = Nodes("adaptive", p=1, d=1)
    nodes.report(nodes.prefill[0], queued_tokens=5000)
    assert nodes.place(800, slo=INTERACTIVE).side == "local"


def finish(nodes: Nodes, number: int, prompt: int, num_output: int, slo: Slo) -> None:
    """So many requests are served, one after the other."""
    for _ in range(number):
        booking = nodes.send(prompt, max_tokens=1000, slo=slo)
        booking.progressed(num_output)
        booking.end(by_itself=True)


def test_adaptive_has_prefill_nodes_decode_when_that_is_what_there_is_to_do() -> None:
    """Short prompts, long answers: as in co-located mode with as many nodes."""
    spread = {}
    for mode, pools in (("adaptive", {"p": 1, "d": 1}), ("colocated", {"d": 2})):
        nodes = Nodes(mode, **pools)  # type: ignore[arg-type]
        finish(nodes, FEWEST, 5, 500, INTERACTIVE)
        for _ in range(12):
            booking = nodes.send(5, max_tokens=500, slo=INTERACTIVE)
            nodes.clock.advance(0.1)
            booking.progressed(1)
        members = nodes.prefill + nodes.decode
        spread[mode] = [round(nodes.router.node_outlook(member).tpot_s / MS) for member in members]
    assert spread["adaptive"] == spread["colocated"] == [6, 6]


def test_adaptive_keeps_pools_apart_where_so_more_is_served() -> None:
    """Chunks beside large batches would be small."""
    nodes = Nodes("adaptive", perf=BATCHES, p=1, d=1)
    idle = nodes.place(100, slo=INTERACTIVE)
    assert idle.side == "local"  # sooner, and nobody is there
    finish(nodes, FEWEST, 100, 50, INTERACTIVE)
    assert nodes.place(100, slo=INTERACTIVE).side == "pair"


def test_adaptive_takes_streams_of_prefill_nodes_into_account() -> None:
    """They make chunks small, and so the next prompt late."""
    nodes = Nodes("adaptive", p=1, d=1)
    tight = Slo(ttft_s=3.0, tpot_s=0.030)
    calm = nodes.place(400, slo=tight)
    assert names(calm) == ("p0", "d0") or calm.side == "local"
    for _ in range(8):
        request = nodes.request(1, max_tokens=2000, slo=tight)
        placement = structs.replace(
            nodes.router.place(request), prefill=None, decode=nodes.prefill[0]
        )
        nodes.router.dispatched(request, placement).progressed(1)
    for _ in range(6):
        send_to(nodes, nodes.decode[0], 1, max_tokens=2000).progressed(1)
    placement = nodes.place(400, slo=tight)
    assert placement.ttft_s > 1.2 * calm.ttft_s


def test_a_local_request_waits_for_its_place_before_token_one() -> None:
    """Ten may be in a batch; the wait is part of the TTFT, not of the TPOT."""
    nodes = Nodes("colocated", d=1)
    fill(nodes)
    placement = nodes.place(10, max_tokens=101)
    assert placement.queue_s == pytest.approx(2.0, abs=0.2)
    assert placement.tpot_s < 1.5 * MS


def test_a_pair_waits_for_its_place_behind_token_one() -> None:
    nodes = Nodes(p=1, d=1)
    fill(nodes)
    placement = nodes.place(10, max_tokens=101)
    assert placement.queue_s == 0
    assert placement.tpot_s == pytest.approx((2.0 + 100 * MS) / 100, rel=0.1)


@pytest.mark.parametrize(
    ("hold_s", "waited_s", "held_s"), [(9.0, 0.0, 2.0), (1.5, 0.0, 1.5), (1.5, 1.0, 0.5)]
)
def test_a_wait_that_token_one_is_held_back_for_is_part_of_the_ttft(
    hold_s: float, waited_s: float, held_s: float
) -> None:
    nodes = Nodes(p=1, d=1)
    fill(nodes)
    slo = Slo(ttft_s=10.0, tpot_s=0.25)
    request = structs.replace(nodes.request(10, max_tokens=101, slo=slo), waited_s=waited_s)
    at_once = nodes.router.place(request)
    request = structs.replace(request, slo=msgspec.structs.replace(slo, hold_s=hold_s))
    held = nodes.router.place(request)
    assert held.queue_s == pytest.approx(held_s, abs=0.2)
    assert 100 * (at_once.tpot_s - held.tpot_s) == pytest.approx(held.queue_s)
    sibling = nodes.router.place_sibling(request, held)
    assert (sibling.wait_s, sibling.held_s) == pytest.approx((held.wait_s, held.held_s)), "as long"


def fill(nodes: Nodes) -> None:
    """Every place of the first decode node is taken, for two seconds."""
    for _ in range(10):
        send_to(nodes, nodes.decode[0], 1, max_tokens=200).progressed(1)


def test_a_place_that_is_meant_for_others_is_not_taken_for_free() -> None:
    """Nine run; the tenth is on its way, and was sent there earlier."""
    nodes = Nodes("colocated", d=1)
    for _ in range(9):
        send_to(nodes, nodes.decode[0], 1, max_tokens=200).progressed(1)
    assert nodes.place(1).queue_s < 0.1
    request = nodes.request(1, max_tokens=200)
    placement = structs.replace(nodes.router.place(request), ttft_s=0.05, tpot_s=0.010)
    nodes.router.dispatched(request, placement)
    assert nodes.place(1).queue_s > 1.9


def test_when_nothing_can_be_kept_a_request_stays_on_one_node() -> None:
    nodes = Nodes("adaptive", p=1, d=1)
    for member in (*nodes.prefill, *nodes.decode):
        nodes.report(member, queued_tokens=50_000)
    assert nodes.place(800, slo=INTERACTIVE).side == "local"


def with_late_pairs() -> tuple[Nodes, Callable[[], Booking]]:
    """A long prefill queue, and a decode node that has two places; sends pairs to these."""
    nodes = Nodes("adaptive", p=1, d=1)
    nodes.report(nodes.prefill[0], queued_tokens=50_000)
    for _ in range(8):
        send_to(nodes, nodes.decode[0], 1, max_tokens=200).progressed(1)

    def send_pair() -> Booking:
        request = nodes.request(1, max_tokens=200)
        placement = nodes.router.place(request)
        pair = structs.replace(
            placement, prefill=nodes.prefill[0], decode=nodes.decode[0], ttft_s=0.3
        )
        return nodes.router.dispatched(request, structs.replace(pair, tpot_s=0.010))

    return nodes, send_pair


def test_adaptive_does_not_take_a_place_that_one_on_its_way_needs() -> None:
    nodes, send_pair = with_late_pairs()
    for side in ("local", "local", "pair"):
        assert nodes.place(100, max_tokens=300, slo=INTERACTIVE).side == side
        send_pair()


def test_adaptive_sends_no_prompt_behind_requests_that_wait_for_a_place() -> None:
    """They go first, as often as there is a place, since their prompts are computed."""
    nodes, send_pair = with_late_pairs()
    booking = send_pair()
    booking.progressed(1)
    for waited_s, side in ((0.3, "local"), (0.2, "pair")):  # four full steps take 0.4 s
        nodes.clock.advance(waited_s)
        assert nodes.place(100, max_tokens=100, slo=INTERACTIVE).side == side
    booking.progressed(2)
    assert nodes.place(100, max_tokens=100, slo=INTERACTIVE).side == "local"


def test_adaptive_serves_without_prefill_nodes() -> None:
    nodes = Nodes("adaptive", d=1)
    assert nodes.router.can_route()
    assert nodes.place().side == "local"
