"""Nodes without an engine: what they answer to legs."""

from __future__ import annotations

import asyncio
from typing import cast

from pdserve.commands.bench.coordinator.simulated_node import Beat, SimulatedNode
from pdserve.node.coordinator_link import CoordinatorLink
from pdserve.protocol import (
    DecodeLeg,
    FinishReason,
    NodeAddress,
    NodeRole,
    PrefillLeg,
    Prompt,
    SamplingParams,
    TokenBatch,
    TokenEvent,
)

SOURCE = NodeAddress(node_id="p", incarnation="1", session_address="p:1")


class Link:
    """Keeps what is sent over it."""

    def __init__(self) -> None:
        self.sent: list[TokenBatch] = []

    def send(self, message: TokenBatch) -> None:
        self.sent.append(message)

    def events(self) -> list[TokenEvent]:
        """Since the last look."""
        sent, self.sent = self.sent, []
        return [event for batch in sent for event in batch.each()]


class PlayedBeat(Beat):
    """Steps when it is told to."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def step(self) -> None:
        for on_step in self._listeners:
            on_step()


def node(role: NodeRole, beat: Beat) -> SimulatedNode:
    return SimulatedNode("n", role, "m", "127.0.0.1:1", beat)


async def test_a_prefill_is_token_1_at_once() -> None:
    link = Link()
    prefill = node(NodeRole.PREFILL, PlayedBeat())
    for name, handoff in (("a", True), ("b", False)):
        leg = PrefillLeg(
            request_id=name, prompt=Prompt([1]), sampling=SamplingParams(), handoff=handoff
        )
        prefill.start_prefill(leg, cast(CoordinatorLink, link))
    await asyncio.sleep(0)
    assert len(link.sent) == 1
    events = [(event.request_id, event.index, event.finish_reason) for event in link.events()]
    assert events == [("a", 0, None), ("b", 0, FinishReason.LENGTH)]


def test_a_decode_leg_has_one_token_a_step_until_its_last_or_its_cancel() -> None:
    link, beat = Link(), PlayedBeat()
    decode = node(NodeRole.DECODE, beat)
    for name, source in (("handed off", SOURCE), ("local", None), ("cancelled", SOURCE)):
        leg = DecodeLeg(
            request_id=name,
            prompt=Prompt([1]),
            sampling=SamplingParams(max_tokens=3),
            source=source,
        )
        decode.start_decode(leg, cast(CoordinatorLink, link))
    beat.step()
    assert {(e.request_id, e.index) for e in link.events()} == {
        ("handed off", 1),
        ("local", 0),
        ("cancelled", 1),
    }
    decode.cancel_leg("cancelled", "enough")
    beat.step()
    last = {(e.request_id, e.index, e.finish_reason) for e in link.events()}
    assert last == {("handed off", 2, FinishReason.LENGTH), ("local", 1, None)}
    beat.step()
    assert [(e.request_id, e.index) for e in link.events()] == [("local", 2)]
    decode.coordinator_lost(cast(CoordinatorLink, link))
    beat.step()
    assert link.events() == []
