"""Nodes of one host, which decode more slowly at once than one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.nodes.registry import Member
from coordinator.routing.placement import Newcomer
from pdserve.protocol import NodeRole, PerfReport, Slo, StepCosts
from tests.unit.coordinator.routing.nodes import Nodes, names, send_to

# A step reads the weights, which takes 4 ms; a decode step costs about 0.5 ms more a request. So
# there are 10 places within 9 ms, and 43 within 27 ms.
PERF = PerfReport(
    step=StepCosts(knot_tokens=[1, 20, 100], knot_s=[0.004, 0.004, 0.008], sampled_s=0.0005),
    token_budget=100,
    max_batch_size=64,
)
TIGHT = Slo(ttft_s=1.0, tpot_s=0.010)
LOOSE = Slo(ttft_s=1.0, tpot_s=0.030)


def two_nodes(*hosts: str) -> tuple[Nodes, Member, Member]:
    """A prefill node and a decode node, which has two streams."""
    nodes = Nodes("adaptive")
    roles = (NodeRole.PREFILL, NodeRole.DECODE)
    prefill, decode = (
        nodes.join(role.name.lower(), role, PERF, host)
        for role, host in zip(roles, hosts, strict=True)
    )
    for _ in range(2):
        send_to(nodes, decode, 1, max_tokens=2000).progressed(1)
    return nodes, prefill, decode


def both_decode(nodes: Nodes, prefill: Member, decode: Member, *ratios: float) -> None:
    """For a while, in which they report these; only the first is to have more to do after it."""
    booking = send_to(nodes, prefill, 1, max_tokens=2000)
    booking.progressed(1)
    for ratio in ratios:
        for member in (prefill, decode):
            nodes.report(member, decode_ratio=ratio)
    booking.end(by_itself=False)
    for _ in range(2):
        nodes.report(decode, decode_ratio=1.0)
    nodes.report(prefill, decode_ratio=1.0)


def helps(nodes: Nodes, slo: Slo = TIGHT) -> bool:
    """Whether the prefill node, which has nothing to do, would decode a short request."""
    return names(nodes.place(5, max_tokens=200, slo=slo)) == (None, "prefill")


@pytest.mark.parametrize(
    ("ratio", "has_more_places"),
    [(1.25, True), (1.6, False)],  # 7 + 7 places, or 4 + 4, and 10 on the decode node alone
)
def test_a_prefill_node_decodes_if_its_host_decodes_more_by_it(
    ratio: float, has_more_places: bool
) -> None:
    nodes, prefill, decode = two_nodes("h", "h")
    assert not helps(nodes), "until it was seen, they are taken to take turns: 2 + 2 places"
    both_decode(nodes, prefill, decode, ratio, ratio)
    assert helps(nodes) == has_more_places


def test_a_loose_promise_leaves_room_for_slower_steps() -> None:
    """Also before any was seen: 36 + 36 places if they take turns, and 43 on one node."""
    nodes, prefill, decode = two_nodes("h", "h")
    assert helps(nodes, LOOSE)
    both_decode(nodes, prefill, decode, 2.5, 2.5)
    assert not helps(nodes)
    assert helps(nodes, LOOSE), "30 + 31: larger steps wait no longer than the small ones did"


def test_while_both_decode_that_is_no_reason_to_go_on() -> None:
    """Both are slow then; the profile says what the decode node would do without the other."""
    nodes, prefill, decode = two_nodes("h", "h")
    send_to(nodes, prefill, 1, max_tokens=2000).progressed(1)
    for _ in range(2):
        for member in (prefill, decode):
            nodes.report(member, decode_ratio=2.5)
    assert names(nodes.place(5, max_tokens=200, slo=TIGHT))[1] == "decode"


def test_what_was_half_of_each_says_nothing() -> None:
    """The first report after a change is of steps before it, too."""
    nodes, prefill, decode = two_nodes("h", "h")
    both_decode(nodes, prefill, decode, 1.25)
    assert not helps(nodes)


def test_a_node_that_has_measured_no_step_says_nothing() -> None:
    nodes, prefill, decode = two_nodes("h", "h")
    both_decode(nodes, prefill, decode, *[0.0] * 5)
    neighbours, slots = nodes.router._books.neighbours, [prefill.slot, decode.slot]
    assert not neighbours.beside[slots].any()
    assert not neighbours.beside_step_s[slots].any()
    both_decode(nodes, prefill, decode, 1.6, 1.6, *[0.0] * 5)
    assert neighbours.beside[slots] == pytest.approx(1.6)
    assert not helps(nodes)


def test_other_hosts_are_none_of_its_business() -> None:
    nodes, prefill, decode = two_nodes("h", "i")
    both_decode(nodes, prefill, decode, 2.5, 2.5)
    assert helps(nodes)


def test_what_was_seen_is_forgotten_with_the_node() -> None:
    nodes, prefill, decode = two_nodes("h", "h")
    both_decode(nodes, prefill, decode, 1.25, 1.25)
    assert helps(nodes)
    nodes.registry.remove(decode)
    nodes.registry.remove(prefill)
    decode = nodes.join("decode", NodeRole.DECODE, PERF, host="h")
    nodes.join("prefill", NodeRole.PREFILL, PERF, host="h")
    send_to(nodes, decode, 1, max_tokens=2000).progressed(1)
    assert not helps(nodes)


def test_four_nodes_of_a_host_are_judged_together_and_other_hosts_by_themselves() -> None:
    """Decode nodes lose more to two prefill nodes than these bring, or not: 20 places, 16 or 28."""
    nodes = Nodes("adaptive")
    roles = (NodeRole.PREFILL, NodeRole.PREFILL, NodeRole.DECODE, NodeRole.DECODE)
    h, i = (
        [nodes.join(f"{host}{n}", role, PERF, host) for n, role in enumerate(roles)]
        for host in "hi"
    )
    neighbours, fleet = nodes.router._books.neighbours, nodes.router.fleet
    for members, beside in ((h, 1.6), (i, 1.25)):
        for member in members:
            neighbours.apart[member.slot], neighbours.beside[member.slot] = 1.0, beside
            neighbours.beside_step_s[member.slot] = 0.005
    view = Newcomer(5, 10, 0.0).view(fleet, nodes.router._books.decodes, nodes.clock.now())
    h_first, both = np.array([h[0].slot]), np.array([h[3].slot, i[3].slot])
    unfit = [h[0].slot, h[1].slot]
    assert neighbours.better_not(view, h_first, 0.009) == unfit
    assert neighbours.better_not(view, both, 0.009) == unfit
    assert neighbours.better_not(view, np.array([i[0].slot]), 0.009) == []
