"""Nodes that cannot reach each other are routed around, tried again, and used again."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from msgspec import structs

from coordinator.nodes.registry import Member
from coordinator.routing.pairs.health import FIRST_S, LONGEST_S, PROBE_S
from coordinator.status import describe_nodes
from pdserve.protocol import LinkState, NodeState
from pdserve.protocol.status import FailingPeer
from pdserve.settings.config import RouterName
from pdserve.shared.errors import GrammarFailed, PeerLost, StaleTicket, TransferTimeout
from tests.unit.coordinator.routing.nodes import Nodes, names

LOST = PeerLost("d0: lost p0: UNAVAILABLE")


def serve(nodes: Nodes, *broken: Member) -> tuple[str | None, str | None]:
    """One request, start to end; it fails where it needs a node that cannot be reached."""
    placement = nodes.send().placement
    prefill, decode = placement.prefill, placement.decode
    assert prefill is not None
    assert decode is not None
    if prefill in broken or decode in broken:
        nodes.router.health.failed(prefill, decode, LOST)
    else:
        nodes.router.health.worked(prefill, decode)
    return names(placement)


@pytest.mark.parametrize("policy", get_args(RouterName))
def test_after_one_failure_everything_goes_elsewhere(policy: RouterName) -> None:
    nodes = Nodes(policy=policy, p=2, d=1)
    broken = nodes.prefill[0]
    nodes.router.health.failed(broken, nodes.decode[0], LOST)
    assert {serve(nodes, broken)[0] for _ in range(40)} == {"p1"}


def test_it_is_tried_again_with_one_request_and_ever_longer_pauses() -> None:
    nodes = Nodes(policy="round-robin", p=2, d=1)
    broken = nodes.prefill[0]
    tried_s: list[float] = []
    while len(tried_s) < 8:
        if serve(nodes, broken)[0] == "p0":
            tried_s.append(nodes.clock.now())
        nodes.clock.advance(0.25)
    pauses_s = [later - sooner for sooner, later in itertools.pairwise(tried_s)]
    assert pauses_s == pytest.approx([1, 2, 4, 8, 16, 32, LONGEST_S], abs=0.5)


def test_while_it_is_tried_nobody_else_goes_there() -> None:
    nodes = Nodes(policy="round-robin", p=2, d=1)
    p0, d0 = nodes.prefill[0], nodes.decode[0]
    nodes.router.health.failed(p0, d0, LOST)
    nodes.clock.advance(FIRST_S)
    chosen = [names(nodes.send().placement)[0] for _ in range(10)]
    assert chosen.count("p0") == 1
    for _ in range(10):  # its outcome takes longer than the pause
        nodes.clock.advance(0.09 * PROBE_S)
        assert names(nodes.send().placement)[0] != "p0"
    nodes.clock.advance(0.2 * PROBE_S)  # whoever tried it has not been heard of: another one does
    assert [names(nodes.send().placement)[0] for _ in range(10)].count("p0") == 1


def test_a_pair_that_works_again_is_used_like_others() -> None:
    nodes = Nodes(policy="round-robin", p=2, d=1)
    p0, d0 = nodes.prefill[0], nodes.decode[0]
    nodes.router.health.failed(p0, d0, LOST)
    nodes.clock.advance(FIRST_S)
    assert [serve(nodes)[0] for _ in range(10)].count("p0") == 5
    assert nodes.router.health.num_failing == 0


def test_requests_that_were_on_their_way_count_once() -> None:
    nodes = Nodes(p=2, d=1)
    for _ in range(20):
        nodes.router.health.failed(nodes.prefill[0], nodes.decode[0], LOST)
    (failures,) = nodes.router.health.of(nodes.prefill[0]).values()
    assert failures.count == 1


def test_only_the_pair_is_avoided_where_its_nodes_work_with_others() -> None:
    nodes = Nodes(policy="random", p=2, d=2)
    nodes.router.health.failed(nodes.prefill[0], nodes.decode[0], LOST)
    chosen = {serve(nodes) for _ in range(40)}
    assert chosen == {("p0", "d1"), ("p1", "d0"), ("p1", "d1")}


def test_a_node_that_fails_with_two_peers_is_avoided_with_all() -> None:
    nodes = Nodes(policy="random", p=2, d=8)
    broken = nodes.prefill[0]
    failed = [names[1] for _ in range(200) if (names := serve(nodes, broken))[0] == "p0"]
    assert len(failed) == 2
    nodes.clock.advance(FIRST_S)
    again = [serve(nodes, broken)[0] for _ in range(200)]
    assert again.count("p0") == 2  # the same two pairs are tried
    nodes.clock.advance(2 * FIRST_S)
    chosen = {serve(nodes) for _ in range(400)}  # it is mended
    assert {decode for prefill, decode in chosen if prefill == "p0"} == {f"d{i}" for i in range(8)}


def test_a_decode_node_that_reaches_nobody_is_avoided() -> None:
    nodes = Nodes(p=4, d=2)
    broken = nodes.decode[0]
    failed = [names for _ in range(100) if (names := serve(nodes, broken))[1] == "d0"]
    assert len(failed) <= 2


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 2), (3, 1)])
def test_where_all_pairs_fail_decode_nodes_serve_alone_but_for_one_probe_of_each(
    p: int, d: int
) -> None:
    """All links between the pools are cut for a minute, with four requests a second."""
    nodes = Nodes(p=p, d=d)
    pairs = list(itertools.product(nodes.prefill, nodes.decode))
    for pair in pairs:
        nodes.router.health.failed(*pair, LOST)
    under_way: list[tuple[float, Member, Member]] = []
    num_probes = 0
    for _ in range(240):
        nodes.clock.advance(0.25)
        now_s = nodes.clock.now()
        for probe in [probe for probe in under_way if probe[0] <= now_s]:
            under_way.remove(probe)
            nodes.router.health.failed(*probe[1:], LOST)
        assert nodes.router.can_route()
        placement = nodes.send().placement
        assert placement.decode is not None
        if placement.prefill is not None:
            probed = (placement.prefill, placement.decode)
            assert probed not in [probe[1:] for probe in under_way], "one at a time"
            under_way.append((now_s + 3.0, *probed))  # as long as a session takes to fail
            num_probes += 1
    assert len(pairs) <= num_probes <= 5 * len(pairs), "after pauses of 1, 2, 4, 8, 16 s"
    for _, prefill, decode in under_way:
        nodes.router.health.worked(prefill, decode)
    nodes.clock.advance(LONGEST_S)
    assert names(nodes.send().placement)[0] is not None


def test_what_has_failed_once_tries_nothing_that_fails() -> None:
    """It goes where handoffs work, or to a decode node; and the way that is due stays so."""
    nodes = Nodes(p=1, d=2)
    prefill, cut, other = nodes.prefill[0], *nodes.decode
    nodes.router.health.failed(prefill, cut, LOST)
    nodes.clock.advance(FIRST_S)
    again = structs.replace(nodes.request(), was_interrupted=True)
    assert names(nodes.router.place(again)) == ("p0", "d1")
    nodes.router.health.failed(prefill, other, LOST)
    assert names(nodes.router.place(again))[0] is None
    assert names(nodes.place()) == ("p0", "d0")


def link_to(*peers: str) -> list[LinkState]:
    return [LinkState(peer=peer, transport="tcp", reason="") for peer in peers]


def test_a_session_that_is_gone_is_a_way_that_fails_before_any_request_does() -> None:
    nodes = Nodes(p=2, d=2)
    for decode in nodes.decode:
        nodes.report(decode, links=link_to("p0", "p1"))
    nodes.report(nodes.decode[1], links=link_to("p1"))
    assert set(nodes.router.health.of(nodes.decode[1])) == {"p0"}
    assert ("p0", "d1") not in {names(nodes.send().placement) for _ in range(40)}
    nodes.report(nodes.decode[1], links=link_to("p1"))
    (failures,) = nodes.router.health.of(nodes.decode[1]).values()
    assert failures.count == 1, "it is not told with each report"


@pytest.mark.parametrize("state", [NodeState.DRAINING, None])
def test_a_session_with_a_node_that_leaves_has_not_failed(state: NodeState | None) -> None:
    nodes = Nodes(p=2, d=1)
    (decode,) = nodes.decode
    nodes.report(decode, links=link_to("p0", "p1"))
    if state is None:
        nodes.registry.remove(nodes.prefill[0])
    else:
        nodes.report(nodes.prefill[0], state=state)
    nodes.report(decode, links=link_to("p1"))
    assert nodes.router.health.num_failing == 0


def test_in_adaptive_mode_one_node_serves_what_no_pair_can() -> None:
    nodes = Nodes("adaptive", p=1, d=1)
    nodes.router.health.failed(nodes.prefill[0], nodes.decode[0], LOST)
    assert {names(nodes.send(2000).placement)[0] for _ in range(10)} == {None}


def test_another_life_of_a_node_is_another_node() -> None:
    nodes = Nodes(policy="round-robin", p=2, d=1)
    nodes.router.health.failed(nodes.prefill[0], nodes.decode[0], LOST)
    nodes.registry.remove(nodes.prefill[0])
    nodes.router.health.failed(nodes.prefill[0], nodes.decode[0], LOST)  # one that comes late
    assert nodes.router.health.num_failing == 0


@pytest.mark.parametrize("error", [GrammarFailed("g"), StaleTicket("s")])
def test_what_is_not_about_reaching_a_node_does_not_count(error: Exception) -> None:
    nodes = Nodes(p=2, d=1)
    nodes.router.health.failed(nodes.prefill[0], nodes.decode[0], error)  # type: ignore[arg-type]
    assert nodes.router.health.num_failing == 0


def test_it_is_shown() -> None:
    nodes = Nodes(p=2, d=1)
    nodes.router.health.failed(nodes.prefill[0], nodes.decode[0], TransferTimeout("slow"))
    nodes.clock.advance(0.25)
    shown = {n.node_id: n.failing for n in describe_nodes(nodes.registry, nodes.router)}
    p0, d0 = (FailingPeer(peer, "transfer_timeout", 1, 0.75) for peer in ("p0", "d0"))
    assert shown == {"p0": [d0], "p1": [], "d0": [p0]}


def test_it_is_told_what_follows() -> None:
    nodes = Nodes(policy="round-robin", p=2, d=1)
    p0, d0 = nodes.prefill[0], nodes.decode[0]

    def told() -> str:
        (node,) = (n for n in describe_nodes(nodes.registry, nodes.router) if n.node_id == "p0")
        return node.failing[0].told

    nodes.router.health.failed(p0, d0, LOST)
    assert told() == "peer_lost, 1 in a row, tried again in 1 s"
    nodes.clock.advance(FIRST_S)
    assert told() == "peer_lost, 1 in a row, tried again by the next request"
    while names(nodes.send().placement)[0] != "p0":
        pass
    assert told() == "peer_lost, 1 in a row, being tried again"
