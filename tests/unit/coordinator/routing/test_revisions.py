"""Nodes of two revisions: a request stays with one of them, and KV never moves between them."""

from __future__ import annotations

from typing import get_args

import pytest
from msgspec import structs

from coordinator.prefixes.index import PromptHashes
from pdserve.protocol import NodeRole
from pdserve.settings.config import Mode, RouterName
from tests.matrix import matrix
from tests.unit.coordinator.routing.nodes import Nodes, names

PREFILL, DECODE = NodeRole


def two(mode: Mode = "disaggregated", policy: RouterName = "predicted") -> Nodes:
    nodes = Nodes(mode, policy)
    for revision in ("a", "b"):
        nodes.join(f"p-{revision}", PREFILL, revision=revision)
        nodes.join(f"d-{revision}", DECODE, revision=revision)
    return nodes


@pytest.mark.parametrize("mode", matrix(get_args(Mode), 2))
@pytest.mark.parametrize("policy", get_args(RouterName))
def test_a_request_goes_to_nodes_of_its_revision(mode: Mode, policy: RouterName) -> None:
    nodes = two(mode, policy)
    for revision in ("a", "b") * 20:
        placement = nodes.send(20, revision=revision).placement
        used = {name for name in names(placement) if name}
        assert used <= {f"p-{revision}", f"d-{revision}"}
        assert placement.revision == revision


@pytest.mark.parametrize("policy", get_args(RouterName))
def test_pairs_are_of_one_revision(policy: RouterName) -> None:
    nodes = two(policy=policy)
    chosen = {names(nodes.send(20).placement) for _ in range(60)}
    assert chosen <= {("p-a", "d-a"), ("p-b", "d-b")}


def test_no_prefix_is_pulled_from_another_revision() -> None:
    nodes = two()
    (prefill_a, _, prefill_b, _) = nodes.registry
    prompt = list(range(40))
    nodes.holds(prefill_a, prompt)
    placement = nodes.place(prompt, revision="b")
    assert placement.prefill is prefill_b
    assert nodes.router.prefix_sources(placement, prefill_b) == []


@pytest.mark.parametrize("mode", get_args(Mode))
def test_without_nodes_of_its_revision_it_goes_to_others(mode: Mode) -> None:
    nodes = two(mode)
    for member in list(nodes.registry):
        if member.hello.revision == "a":
            nodes.registry.remove(member)
    assert nodes.place(20, revision="a").revision == "b"
    assert not nodes.router.can_route("a")


def test_a_running_stream_does_not_move_to_another_revision() -> None:
    nodes = two()
    request = nodes.request(20, revision="a")
    prompt = PromptHashes(request.context)
    elsewhere = nodes.router.place_elsewhere(request, prompt)
    assert elsewhere is not None
    assert elsewhere.revision == "a"
    for member in list(nodes.registry):
        if member.hello.revision == "a" and member.role is DECODE:
            nodes.registry.remove(member)
    assert nodes.router.place_elsewhere(request, prompt) is None


def test_what_was_interrupted_has_its_prompt_computed_by_the_weights_that_it_is_for() -> None:
    """Where prefill nodes have others than decode nodes; without any, it goes on all the same."""
    nodes = Nodes()
    prefill = nodes.join("p", PREFILL, arithmetic="int8")
    nodes.join("d", DECODE, arithmetic="int4")
    request = structs.replace(nodes.request(20), output_token_ids=[1, 2], was_interrupted=True)
    assert names(nodes.router.place(request)) == ("p", "d")
    nodes.registry.remove(prefill)
    assert names(nodes.router.place(request)) == (None, "d")
    alike = Nodes(p=1, d=1)
    assert names(alike.router.place(request)) == (None, "d0"), "any node computes it alike"
