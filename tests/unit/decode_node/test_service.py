"""Legs of a decode node: who is told what, and who comes next. No network, and no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from decode_node.service import DecodeNode
from kv_transfer.memory import ExportedPool
from pdserve.kv import KvDtype, KvLayout
from pdserve.node.roles import NodeParts, ServiceFactories
from pdserve.node.services import Services
from pdserve.node.sessions.client import Sessions
from pdserve.node.sessions.session import Session
from pdserve.protocol import (
    DecodeLeg,
    FinishReason,
    HandoffEnded,
    HandoffRecord,
    LegFailed,
    NodeAddress,
    NodeRole,
    PrefixSource,
    Prompt,
    SamplingParams,
    Slo,
    TokenBatch,
)
from pdserve.settings.config import NodeConfig
from pdserve.shared.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    PeerLost,
    RequestCancelled,
    RequestEnded,
)
from prefill_node.service import PrefillNode
from tests.fakes.exporter import BLOCK, SOURCE, ScriptedExporter
from tests.fakes.outbox import RecordingOutbox
from tests.fakes.runner import (
    FakeRunner,
)
from tests.requests import make_request
from tests.unit.node.parts import made_parts
from tests.waits import turn

NUM_BLOCKS = 8
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype=KvDtype.FLOAT32)


class OneSession(Sessions):
    """With the exporter, whoever is asked for."""

    def __init__(self, parts: NodeParts, exporter: ScriptedExporter) -> None:
        super().__init__("d", "1", parts.identity, parts.puller, parts.clock, parts.config.timeouts)
        self._exporter = exporter

    async def get(self, peer: NodeAddress) -> Session:
        return await self._exporter.get(peer)


class Bench:
    """A decode node whose engine does not run, with one scripted session."""

    def __init__(self) -> None:
        self.memory = ExportedPool(NUM_BLOCKS, LAYOUT.block_bytes)
        parts = made_parts("d", self.memory, LAYOUT, NodeConfig())
        self.exporter = ScriptedExporter(parts.clock)
        parts = replace(parts, sessions=OneSession(parts, self.exporter))
        self.puller = parts.puller
        self.clock = parts.clock
        self.legs = parts.legs
        self.metrics = parts.metrics
        self.decode = DecodeNode(parts)
        factories = ServiceFactories(prefill=PrefillNode, decode=lambda _: self.decode)
        self.node = Services(parts, factories, NodeRole.DECODE)
        self.link = RecordingOutbox()

    async def start(
        self,
        request_id: str,
        source: NodeAddress | None = SOURCE,
        max_tokens: int = 4,
        deadline_s: float = 0.0,
    ) -> None:
        self.node.start_decode(
            DecodeLeg(
                request_id=request_id,
                prompt=Prompt([1, 2, 3]),
                sampling=SamplingParams(max_tokens=max_tokens),
                source=source,
                slo=Slo(deadline_s=deadline_s),
            ),
            self.link,
        )
        await turn()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.node.close()
    await bench.puller.close()
    bench.memory.close()


async def test_a_request_that_ended_with_token_one_is_no_failure(bench: Bench) -> None:
    """The prefill node tells the coordinator, over a stream that this node may overtake."""
    await bench.start("r")
    bench.exporter.say(
        HandoffEnded(request_id="r", code=RequestEnded.code, message="token 1 was the last one")
    )
    await turn()
    assert bench.link.sent == []
    assert len(bench.legs) == 0


async def test_any_other_end_of_a_handoff_is_a_failure(bench: Bench) -> None:
    await bench.start("r")
    bench.exporter.say(
        HandoffEnded(request_id="r", code=RequestCancelled.code, message="cancelled")
    )
    await turn()
    (failure,) = bench.link.sent
    assert isinstance(failure, LegFailed)
    assert failure.code == PeerLost.code, "the prefill node gave it up, its client did not"
    assert len(bench.legs) == 0


@pytest.mark.parametrize(("max_tokens", "fits"), [(29, True), (30, False)])
async def test_a_leg_that_would_outgrow_the_pool_is_refused(
    bench: Bench, max_tokens: int, fits: bool
) -> None:
    await bench.start("r", source=None, max_tokens=max_tokens)
    codes = [m.code for m in bench.link.sent if isinstance(m, LegFailed)]
    assert codes == ([] if fits else [ContextLengthExceeded.code])
    assert ("r" in bench.legs) is fits


async def test_a_cancelled_prompt_gives_its_turn_to_who_waits_behind_it(bench: Bench) -> None:
    await bench.start("local", source=None)
    await bench.start("handed off")
    record = HandoffRecord(request_id="handed off", num_tokens=3, token_ids=[4])
    bench.exporter.say(record)  # with nothing to pull, for the sake of the test
    await turn()
    assert bench.decode.num_waiting == 1, "nobody goes past a prompt that waits"
    bench.node.cancel_leg("local", "cancelled")
    await turn()
    assert bench.decode.num_waiting == 0


async def test_so_does_one_whose_deadline_has_passed(bench: Bench) -> None:
    await bench.start("local", source=None, deadline_s=1.0)
    await bench.start("handed off")
    bench.exporter.say(HandoffRecord(request_id="handed off", num_tokens=3, token_ids=[4]))
    await turn()
    late = bench.node.engine.drop_expired(bench.clock.now() + 2.0)
    bench.node.requests_failed(late, DeadlineExceeded("too late"))
    await turn()
    assert bench.decode.num_waiting == 0
    assert "local" not in bench.legs


async def test_a_prompt_is_prefilled_and_decoded_to_its_end(bench: Bench) -> None:
    running = asyncio.create_task(bench.node.engine.run(FakeRunner(BLOCK), bench.node))
    await bench.start("r", source=None, max_tokens=4)
    async with asyncio.timeout(30):
        await bench.legs.wait_empty()
    events = [e for batch in bench.link.sent if isinstance(batch, TokenBatch) for e in batch.each()]
    assert [event.index for event in events] == [0, 1, 2, 3]
    assert events[-1].finish_reason is FinishReason.LENGTH
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_engine_is_set_up_as_the_config_says(bench: Bench) -> None:
    """Blocks are kept for streams, and preempted requests fetched."""
    queues = bench.node.engine.queues
    stream = make_request(30, max_tokens=9, output_token_ids=[1])
    stream.block_table = [0]
    assert queues.headroom.num_kept_free([stream], None) > 1, "more than greedy keeps"
    stream.prefix_sources = [PrefixSource(node=SOURCE, num_tokens=30)]
    queues.preemptions.preempted(stream, for_priority=False)
    assert queues.preemptions.calls_back(stream)
    assert queues.preemptions.to_recall == [stream]
