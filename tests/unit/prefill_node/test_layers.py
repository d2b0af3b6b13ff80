"""Layers are announced when their KV is written: whoever pulls at once gets the right bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from kv_transfer.ticket import read_ticket
from kv_transfer.transports.catalog import choose_kinds
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import SampledToken, Scheduled
from pdserve.node.sessions.server import HandoffMessage
from pdserve.protocol import Announcement, HandoffRecord
from pdserve.settings.config import EngineConfig, HandoffConfig
from tests.fakes.runner import PlainRunner
from tests.unit.prefill_node.bench import BLOCK, LAYOUT, Bench

NUM_BLOCKS = 16


def slots(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]"""
    return data.view(np.float32).reshape(len(data), *LAYOUT.block_shape)


class LayerWriter(PlainRunner):
    """Writes 1 + token * 10 + layer, layer by layer, each only when the one before was pulled."""

    def __init__(self, memory: ExportedPool) -> None:
        self.pulled = threading.Semaphore(0)
        self._pool = slots(memory.data)

    def execute(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> list[SampledToken | None]:
        ends = progress.ends if progress else ()
        for layer in range(LAYOUT.num_layers):
            for row in rows:
                first = row.request.num_computed_tokens
                for token in range(first, first + row.num_tokens):
                    block = row.request.block_table[token // BLOCK]
                    self._pool[block, layer, :, :, token % BLOCK] = 1 + token * 10 + layer
            if layer + 1 in ends:
                assert progress is not None
                progress.done(layer + 1)
                assert self.pulled.acquire(timeout=30), "what was announced has not been pulled"
        return [SampledToken(7) if row.samples else None for row in rows]


@pytest.mark.parametrize("budget", [512, 10], ids=["one chunk", "chunks"])
async def test_what_is_announced_in_mid_step_is_written(budget: int) -> None:
    bench = Bench(NUM_BLOCKS, EngineConfig(token_budget=budget), HandoffConfig(announce_bytes=1))
    num_tokens = 30
    destination = ExportedPool(NUM_BLOCKS, LAYOUT.block_bytes)
    puller = Puller(
        destination, KvIdentity("m", "r", LAYOUT), host_id(), choose_kinds(["shm"], destination)
    )
    runner = LayerWriter(bench.memory)
    said: asyncio.Queue[HandoffMessage] = asyncio.Queue()
    subscriber = said.put_nowait
    async with bench.running(runner):
        link = await puller.connect(bench.exporter.welcome(), 30)
        bench.handoffs.subscribe("r", subscriber)
        bench.start("r", num_tokens)
        num_partial = 0
        while True:
            message = await asyncio.wait_for(said.get(), 30)
            assert isinstance(message, Announcement | HandoffRecord)
            ticket = read_ticket(message.ticket)
            await puller.pull(link, message.ticket, list(range(NUM_BLOCKS)), 0, 30)
            if ticket.end_layer < LAYOUT.num_layers:
                num_partial += 1
                runner.pulled.release()
            if isinstance(message, HandoffRecord):
                break
        assert num_partial == (3 if budget == 512 else 9)
        arrived = slots(destination.data)[: -(-num_tokens // BLOCK)]
        for token in range(num_tokens):
            for layer in range(LAYOUT.num_layers):
                value = arrived[token // BLOCK, layer, :, :, token % BLOCK]
                assert (value == 1 + token * 10 + layer).all(), (token, layer)
        bench.handoffs.settle("r", subscriber, was_pulled=True)
        await link.close()
    await puller.close()
    destination.close()


async def test_cancelled_between_two_layers_the_blocks_are_free_after_the_step() -> None:
    bench = Bench(NUM_BLOCKS, EngineConfig(), HandoffConfig(announce_bytes=1))
    runner = LayerWriter(bench.memory)
    said: asyncio.Queue[HandoffMessage] = asyncio.Queue()
    subscriber = said.put_nowait
    async with bench.running(runner):
        bench.handoffs.subscribe("r", subscriber)
        bench.start("r", 30)
        await asyncio.wait_for(said.get(), 30)
        bench.node.cancel_leg("r", "the client has gone")
        assert bench.handoffs.num_pinned_blocks == 0
        assert bench.pool.num_free < NUM_BLOCKS, "the step still writes to them"
        for _ in range(LAYOUT.num_layers):
            runner.pulled.release()
        ended = await asyncio.wait_for(said.get(), 30)
        assert not isinstance(ended, Announcement)
        async with asyncio.timeout(30):
            while bench.node.engine.queues.running:
                await asyncio.sleep(0)
        assert said.empty()
