"""A whole prefill node whose model is a test's: its engine runs, nothing goes over a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from kv_transfer.memory import ExportedPool
from pdserve.engine.interface import Runner
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import SampledToken, Scheduled
from pdserve.kv import KvDtype, KvLayout
from pdserve.node.reports.gauges import watch_services
from pdserve.protocol import NodeRole, PrefillLeg, Prompt, SamplingParams
from pdserve.settings.config import EngineConfig, HandoffConfig, NodeConfig
from prefill_node.handoffs import Handoffs
from tests.fakes.outbox import RecordingOutbox
from tests.fakes.runner import PlainRunner
from tests.unit.node.parts import made_parts, made_services

BLOCK = 4
LAYOUT = KvLayout(num_layers=4, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype=KvDtype.FLOAT32)


class Link(RecordingOutbox):
    """Says when something was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def send(self, message: msgspec.Struct) -> None:
        super().send(message)
        self.changed.set()


class QuickRunner(PlainRunner):
    """Samples the same token for everybody."""

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        for num_layers in progress.ends if progress else ():
            assert progress is not None
            progress.done(num_layers)
        return [SampledToken(7) if row.samples else None for row in rows]


class Bench:
    """A prefill node with `num_blocks` blocks, and whom its coordinator would hear."""

    def __init__(self, num_blocks: int, engine: EngineConfig, handoff: HandoffConfig) -> None:
        self.memory = ExportedPool(num_blocks, LAYOUT.block_bytes)
        config = NodeConfig(engine=engine, handoff=handoff)
        parts = made_parts("p", self.memory, LAYOUT, config, ["shm"])
        self.pool, self.exporter, self.puller = parts.pool, parts.exporter, parts.puller
        self.metrics = parts.metrics
        self.link = Link()
        self.node = made_services(parts, NodeRole.PREFILL)
        self.handoffs = self.node.announcer
        assert isinstance(self.handoffs, Handoffs)
        watch_services(self.metrics, self.node)

    def start(self, request_id: str, num_tokens: int) -> None:
        """A prefill leg arrives, whose prefix is nobody else's."""
        self.node.start_prefill(
            PrefillLeg(
                request_id=request_id,
                prompt=Prompt(list(range(num_tokens)), request_id),
                sampling=SamplingParams(max_tokens=4),
            ),
            self.link,
        )

    def metric(self, name: str) -> float:
        """A metric without labels."""
        lines = self.metrics.exposition().decode().splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith(f"pdserve_{name} ")]
        return float(value)

    @asynccontextmanager
    async def running(self, runner: Runner) -> AsyncIterator[None]:
        """The engine steps; at the end every block must be free."""
        await self.exporter.start("127.0.0.1")
        task = asyncio.create_task(self.node.engine.run(runner, self.node))
        try:
            yield
            await asyncio.sleep(0)
            assert self.pool.num_free == self.pool.num_blocks, "blocks were lost"
            assert self.handoffs.num_pinned_blocks == 0
            self.pool.check_integrity()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.node.close()
            await self.exporter.close()
            await self.puller.close()
            self.memory.close()
