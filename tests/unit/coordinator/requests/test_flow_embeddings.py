"""Requests that end with their prompts: one leg, and no second node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.generation import GenerationRequest
from coordinator.requests.running import RunningRequest
from pdserve.protocol import (
    DecodeLeg,
    FinishReason,
    NodeRole,
    PrefillLeg,
    Prompt,
    SamplingParams,
    TokenEvent,
)
from pdserve.shared.pooling import Pooling
from tests.fakes.members import heard
from tests.unit.coordinator.requests.test_flow import Nodes, sent

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE


@pytest.fixture(params=["disaggregated", "colocated", "adaptive"])
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    nodes = Nodes(mode=request.param)
    yield nodes
    assert nodes.flow.num_inflight == 0


def embed(nodes: Nodes) -> RunningRequest:
    return nodes.flow.start(
        GenerationRequest(
            request_id="e",
            prompt=Prompt([1, 2, 3, 4, 5]),
            sampling=SamplingParams(max_tokens=0, pooling=Pooling.LAST),
        )
    )


def answer() -> TokenEvent:
    return TokenEvent(
        request_id="e",
        index=0,
        token_ids=[],
        finish_reason=FinishReason.LENGTH,
        embedding=b"\0\0\x80?",
    )


async def embeddings(running: RunningRequest) -> list[bytes]:
    return [event.embedding for event in await heard(running)]


async def test_prefill_nodes_alone_serve_them() -> None:
    nodes = Nodes()
    member = nodes.join("p", PREFILL)
    running = embed(nodes)
    (leg,) = sent(member)
    assert isinstance(leg, PrefillLeg)
    assert not leg.handoff
    assert (running.route.prefill_node, running.route.decode_node) == ("p", None)
    nodes.say(member, answer())
    assert await embeddings(running) == [answer().embedding]
    assert sent(member) == []
    assert nodes.flow.num_inflight == 0


async def test_where_decode_nodes_prefill_they_do_all_of_it() -> None:
    nodes = Nodes(mode="colocated")
    member = nodes.join("d", DECODE)
    running = embed(nodes)
    (leg,) = sent(member)
    assert isinstance(leg, DecodeLeg)
    assert leg.source is None
    nodes.say(member, answer())
    assert await embeddings(running) == [answer().embedding]


async def test_they_say_nothing_about_how_long_answers_are() -> None:
    nodes = Nodes()
    member = nodes.join("p", PREFILL)
    nodes.join("d", DECODE)
    before = await expected_tokens(nodes)
    for _ in range(20):
        running = embed(nodes)
        nodes.say(member, answer())
        await embeddings(running)
    assert await expected_tokens(nodes) == before


async def expected_tokens(nodes: Nodes) -> int:
    """Of an answer that might be long."""
    running = nodes.start(max_tokens=60)
    assert running.dispatch is not None
    running.cancel("it was only to see")
    return running.dispatch.booking.placement.output_tokens
