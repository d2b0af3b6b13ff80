"""Requests are handed off only between nodes that share a transport."""

from __future__ import annotations

from typing import get_args

import pytest

from coordinator.nodes.registry import Member
from coordinator.routing.pairs.reach import ALONE_S
from coordinator.status import describe_nodes
from pdserve.protocol import NodeRole, NodeState, TransportReach
from pdserve.settings.config import Mode, RouterName
from pdserve.shared.errors import NoNodeAvailable
from tests.unit.coordinator.routing.nodes import Nodes, names

TCP = TransportReach(name="tcp")
NCCL = TransportReach(name="nccl")
HERE, THERE = (TransportReach(name="shm", domain=host) for host in ("host-1", "host-2"))
PREFILL, DECODE = NodeRole


def mixed(mode: Mode = "disaggregated", policy: RouterName = "predicted") -> Nodes:
    """Of its pairs, three share a transport: p0 with d0, and p1 with both d0 and d1."""
    nodes = Nodes(mode, policy)
    nodes.join("p0", PREFILL, transports=[HERE])
    nodes.join("p1", PREFILL, transports=[HERE, TCP])
    nodes.join("p2", PREFILL, transports=[NCCL])
    nodes.join("p3", PREFILL, transports=[])
    nodes.join("d0", DECODE, transports=[TCP, HERE])
    nodes.join("d1", DECODE, transports=[THERE, TCP])
    nodes.join("d2", DECODE, transports=[THERE])
    return nodes


def apart(mode: Mode = "disaggregated") -> Nodes:
    """No two of its nodes share a transport."""
    nodes = Nodes(mode)
    nodes.join("p0", PREFILL, transports=[HERE, NCCL])
    nodes.join("d0", DECODE, transports=[THERE])
    return nodes


@pytest.mark.parametrize("policy", get_args(RouterName))
def test_every_policy_pairs_nodes_that_share_a_transport(policy: RouterName) -> None:
    nodes = mixed(policy=policy)
    chosen = {names(nodes.send().placement) for _ in range(60)}
    assert chosen <= {("p0", "d0"), ("p1", "d0"), ("p1", "d1")}
    assert len(chosen) > 1


def test_only_a_node_that_can_pull_the_prompt_can_keep_its_pace() -> None:
    nodes = Nodes()
    nodes.join("p0", PREFILL, transports=[HERE])
    busy = nodes.join("d0", DECODE, transports=[HERE])
    nodes.join("d1", DECODE, transports=[THERE])
    for _ in range(5):
        nodes.send(10, max_tokens=1000).progressed(1)
    placement = nodes.place(10)
    assert placement.decode is busy
    within_s = nodes.router.tpot_within_s(placement, 0.002)
    assert within_s is not None
    assert within_s > 1
    nodes.router.mode = "adaptive"
    assert nodes.router.tpot_within_s(placement, 0.002) == 0


def test_a_single_token_needs_no_pair() -> None:
    nodes = mixed(policy="round-robin")
    chosen = {names(nodes.place(max_tokens=1)) for _ in range(4)}
    assert chosen == {("p0", None), ("p1", None), ("p2", None), ("p3", None)}
    assert names(apart().place(max_tokens=1)) == ("p0", None)


def test_another_answer_goes_to_a_node_that_can_pull_the_same_prompt() -> None:
    nodes = mixed(policy="round-robin")
    for _ in range(4):
        first = nodes.place()
        assert first.prefill is not None
        for _ in range(3):
            sibling = nodes.router.place_sibling(nodes.request(), first)
            assert sibling.decode is not None
            assert sibling.decode.exchanges_kv(first.prefill)


def test_without_any_pair_the_error_says_what_each_pool_has() -> None:
    nodes = apart()
    assert not nodes.router.can_route()
    expected = (
        r"prefill nodes have nccl and shm \(within a host\), "
        r"decode nodes have shm \(within a host\); start both pools with a common one"
    )
    with pytest.raises(NoNodeAvailable, match=expected):
        nodes.place()
    nodes.join("d1", DECODE, transports=[NCCL])
    assert nodes.router.can_route()
    assert names(nodes.place()) == ("p0", "d1")


def test_in_adaptive_mode_one_node_serves_what_cannot_be_handed_off() -> None:
    nodes = apart("adaptive")
    assert nodes.router.can_route()
    sides = {names(nodes.send(prompt).placement) for prompt in (10, 2000) * 10}
    assert sides <= {(None, "p0"), (None, "d0")}
    nodes = mixed("adaptive")
    for prompt in (10, 2000) * 10:
        placement = nodes.send(prompt).placement
        if placement.prefill is not None and placement.decode is not None:
            assert placement.prefill.exchanges_kv(placement.decode)


def test_nodes_that_come_go_and_change_pools_change_the_pairs() -> None:
    nodes = mixed()
    nodes.registry.remove(member(nodes, "d0"))
    assert {names(nodes.send().placement) for _ in range(20)} == {("p1", "d1")}
    nodes.report(member(nodes, "p1"), state=NodeState.DRAINING)
    with pytest.raises(NoNodeAvailable, match="shares a KV transport"):
        nodes.place()
    nodes.report(member(nodes, "d1"), role=PREFILL)
    nodes.report(member(nodes, "d2"))
    assert {names(nodes.send().placement) for _ in range(20)} == {("d1", "d2")}


def test_with_a_transport_that_all_have_nothing_is_looked_up_by_node() -> None:
    """The very arrays of the pools: no copies, and policies may keep what they know of them."""
    nodes = Nodes(p=3, d=2)
    fleet, pairs = nodes.router.fleet, nodes.router.pairs
    assert pairs.prefills() is fleet.ready(PREFILL)
    assert all(pairs.decodes(p.slot) is fleet.ready(DECODE) for p in nodes.prefill)


def test_a_prefix_is_not_fetched_from_where_it_cannot_be() -> None:
    nodes = mixed()
    prompt = list(range(101))
    for node_id in ("p1", "p2", "d1"):
        nodes.holds(member(nodes, node_id), prompt)
    placement = nodes.place(prompt)
    sources = nodes.router.prefix_sources(placement, member(nodes, "p0"))
    assert [source.node.node_id for source in sources] == ["p1"]


def test_a_node_that_can_hand_nothing_off_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And not while the others of its pool are being started."""
    nodes = mixed()
    early = nodes.join("p4", PREFILL, transports=[TransportReach(name="ucx")])
    for _ in range(2):
        for each in nodes.registry:
            nodes.report(each)
    assert "shares no" not in caplog.text
    nodes.join("d4", DECODE, transports=[TransportReach(name="ucx")])
    for _ in range(2):
        nodes.clock.advance(ALONE_S)
        for each in nodes.registry:
            nodes.report(each)
    assert nodes.router.pairs.is_alone(member(nodes, "p2"))
    assert not nodes.router.pairs.is_alone(early)
    told = [record.message for record in caplog.records if "shares no" in record.message]
    assert told == [
        "p2 shares no KV transport with any decode node: it has nccl",
        "p3 shares no KV transport with any decode node: it has none",
        "d2 shares no KV transport with any prefill node: it has shm",
    ]
    described = describe_nodes(nodes.registry, nodes.router)
    assert [node.node_id for node in described if node.is_alone] == ["d2", "p2", "p3"]
    assert next(n.transports for n in described if n.node_id == "p1") == ["shm", "tcp"]


def test_nobody_is_alone_before_the_other_pool_is_there() -> None:
    nodes = Nodes()
    first = nodes.join("p0", PREFILL, transports=[])
    assert not nodes.router.pairs.is_alone(first)


def member(nodes: Nodes, node_id: str) -> Member:
    return next(m for m in nodes.registry if m.node_id == node_id)
