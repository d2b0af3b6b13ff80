"""From what nodes say they hold to the hints in the legs that others get."""

from __future__ import annotations

import pytest

from coordinator.admission import Admission, WaitingLine
from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member, Registry
from coordinator.requests.running import RunningRequest
from coordinator.routing import Router
from pdserve.protocol import (
    DecodeLeg,
    KvEvents,
    KvTier,
    NodeRole,
    PrefillLeg,
    PrefixSource,
    Prompt,
    SamplingParams,
)
from pdserve.settings.config import Mode
from tests.fakes.hellos import node_hello
from tests.fakes.members import made_flow, said_to
from tests.fakes.outbox import RecordingOutbox

PROMPT = list(range(21))


class Cluster:
    """A flow over nodes that say what they hold."""

    def __init__(self, mode: Mode = "disaggregated") -> None:
        self.registry = Registry()
        admission = Admission(WaitingLine[RunningRequest](8))
        self.flow = made_flow(self.registry, Router(self.registry, mode), admission)
        self.num_requests = 0

    def join(self, node_id: str, role: NodeRole) -> Member:
        return self.registry.add(node_hello(node_id, role), RecordingOutbox())  # type: ignore[arg-type]

    def holds(self, member: Member, num_tokens: int, tier: KvTier = KvTier.POOL) -> None:
        chain = Prompt(PROMPT[:num_tokens]).hashes(4)
        self.flow.kv_events(KvEvents(tier=tier, stored=chain), member)

    async def hints(self, member: Member) -> list[tuple[str, int]]:
        """In the leg that `member` gets of a request for the prompt."""
        self.num_requests += 1
        request = GenerationRequest(
            request_id=f"r{self.num_requests}",
            prompt=Prompt(PROMPT),
            sampling=SamplingParams(max_tokens=4),
        )
        running = self.flow.start(request)
        running.cancel("seen enough")
        legs = [leg for leg in said_to(member) if isinstance(leg, PrefillLeg | DecodeLeg)]
        (leg,) = [leg for leg in legs if leg.request_id == request.request_id]
        return [_summary(source) for source in leg.prefix_sources]


def _summary(source: PrefixSource) -> tuple[str, int]:
    assert source.node.session_address == f"{source.node.node_id}:1"
    return source.node.node_id, source.num_tokens


async def test_the_prefill_node_hears_of_others_that_hold_more() -> None:
    cluster = Cluster()
    prefill = cluster.join("p", NodeRole.PREFILL)
    decode = cluster.join("d", NodeRole.DECODE)
    assert await cluster.hints(prefill) == []
    cluster.holds(decode, 16)
    assert await cluster.hints(prefill) == [("d", 16)]
    assert await cluster.hints(decode) == []  # it pulls everything from the prefill node
    cluster.holds(prefill, 16)
    assert await cluster.hints(prefill) == []


async def test_a_node_that_prefills_for_itself_hears_of_others() -> None:
    cluster = Cluster("colocated")
    first = cluster.join("d0", NodeRole.DECODE)
    second = cluster.join("d1", NodeRole.DECODE)
    cluster.holds(second, 12, KvTier.HOST)
    assert await cluster.hints(first) == [("d1", 12)]


@pytest.mark.parametrize("how", ["evicted", "lost"])
async def test_what_is_gone_is_not_hinted_at(how: str) -> None:
    cluster = Cluster()
    prefill = cluster.join("p", NodeRole.PREFILL)
    decode = cluster.join("d", NodeRole.DECODE)
    cluster.holds(decode, 16)
    if how == "evicted":
        gone = Prompt(PROMPT).hashes(4)[2:3]
        cluster.flow.kv_events(KvEvents(tier=KvTier.POOL, evicted=gone), decode)
        assert await cluster.hints(prefill) == [("d", 8)]
    else:
        cluster.registry.remove(decode)
        cluster.join("d", NodeRole.DECODE)
        assert await cluster.hints(prefill) == []
