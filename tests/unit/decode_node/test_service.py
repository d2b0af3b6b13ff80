"""Legs of a decode node: who is told what, and who comes next. No network, and no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from decode_node.service import DecodeNode
from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from pdserve.clock import SystemClock
from pdserve.config import NodeConfig
from pdserve.engine.block_pool import BlockPool
from pdserve.errors import ContextLengthExceeded, RequestCancelled, RequestEnded
from pdserve.kv_layout import KvDtype, KvLayout
from pdserve.metrics import NodeMetrics
from pdserve.node.roles import NodeParts
from pdserve.protocol import (
    DecodeLeg,
    HandoffEnded,
    HandoffRecord,
    LegFailed,
    NodeAddress,
    NodeState,
    SamplingParams,
)
from tests.unit.decode_node.scripted import BLOCK, SOURCE, Recorder, ScriptedExporter

NUM_BLOCKS = 8
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype=KvDtype.FLOAT32)


class Bench:
    """A decode node whose engine does not run, with one scripted session."""

    def __init__(self) -> None:
        memory = ExportedPool(NUM_BLOCKS, LAYOUT.block_bytes)
        identity = KvIdentity("m", "r", LAYOUT)
        clock = SystemClock()
        self.memory = memory
        self.pool = BlockPool(NUM_BLOCKS, BLOCK, bump_generations=memory.bump)
        self.puller = Puller(memory, identity, host_id(), [])
        self.node = DecodeNode(
            NodeParts(
                config=NodeConfig(),
                node_id="d",
                incarnation="2",
                clock=clock,
                pool=self.pool,
                eos_token_ids=frozenset(),
                max_model_len=NUM_BLOCKS * BLOCK,
                vocab_size=100,
                identity=identity,
                exporter=Exporter("d", "2", identity, memory, clock, []),
                puller=self.puller,
                metrics=NodeMetrics(),
                state=lambda: NodeState.READY,
            )
        )
        self.exporter = ScriptedExporter(clock)
        self.node._intake._sessions = self.exporter  # type: ignore[assignment]
        self.link = Recorder()

    async def start(
        self, request_id: str, source: NodeAddress | None = SOURCE, max_tokens: int = 4
    ) -> None:
        self.node.start_decode(
            DecodeLeg(
                request_id=request_id,
                token_ids=[1, 2, 3],
                sampling=SamplingParams(max_tokens=max_tokens),
                source=source,
            ),
            self.link,  # type: ignore[arg-type]
        )
        await turn()


async def turn() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


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
    assert len(bench.node.legs) == 0


async def test_any_other_end_of_a_handoff_is_a_failure(bench: Bench) -> None:
    await bench.start("r")
    bench.exporter.say(
        HandoffEnded(request_id="r", code=RequestCancelled.code, message="cancelled")
    )
    await turn()
    (failure,) = bench.link.sent
    assert isinstance(failure, LegFailed)
    assert failure.code == RequestCancelled.code
    assert len(bench.node.legs) == 0


@pytest.mark.parametrize(("max_tokens", "fits"), [(29, True), (30, False)])
async def test_a_leg_that_would_outgrow_the_pool_is_refused(
    bench: Bench, max_tokens: int, fits: bool
) -> None:
    await bench.start("r", source=None, max_tokens=max_tokens)
    codes = [m.code for m in bench.link.sent if isinstance(m, LegFailed)]
    assert codes == ([] if fits else [ContextLengthExceeded.code])
    assert ("r" in bench.node.legs) is fits


async def test_a_cancelled_prompt_gives_its_turn_to_who_waits_behind_it(bench: Bench) -> None:
    await bench.start("handed over")
    await bench.start("local", source=None)
    record = HandoffRecord(request_id="handed over", num_tokens=3, token_ids=[4])
    bench.exporter.say(record)  # with nothing to pull, for the sake of the test
    await turn()
    assert bench.node._intake.num_waiting == 1, "nobody goes past a prompt that waits"
    bench.node.cancel_leg("local", "cancelled")
    await turn()
    assert bench.node._intake.num_waiting == 0
