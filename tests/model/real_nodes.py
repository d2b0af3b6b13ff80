"""An exporter's and a puller's real parts in one process, with bytes that say whose they are."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_transfer.exporter import Exporter, TicketRules
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.links.link import Link
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from kv_transfer.transports.catalog import TransportKind
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.kv import KvDtype, KvLayout
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import HandoffRecord, Prompt, SamplingParams
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import PdserveError
from prefill_node.handoffs import Handoffs
from tests.fakes.transport import FakeNetwork
from tests.model.steps import SteppedLoop

NUM_BLOCKS = 6
BLOCK = 4
LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype=KvDtype.FLOAT32)
SCRAP = 0xEE
LEASE_S = 5.0
PULL_S = 12.0


def kv_of(tokens: Sequence[int], position: int, layer: int) -> int:
    """The byte of which a token's KV is made: a function of all tokens up to it, never SCRAP."""
    prefix = bytes(tokens[: position + 1])
    return zlib.crc32(bytes([layer]) + prefix) % SCRAP


def slots(pool: ExportedPool, block_id: int) -> NDArray[np.uint8]:
    """[num_layers, 2 * num_kv_heads, block_size, bytes of head_dim], writable."""
    return pool.data[block_id].reshape(LAYOUT.num_layers, 2, BLOCK, -1)


def write_kv(
    pool: ExportedPool,
    table: Sequence[int],
    tokens: Sequence[int],
    begin: int,
    end: int,
    layer: int,
) -> None:
    for position in range(begin, end):
        block = slots(pool, table[position // BLOCK])
        block[layer, :, position % BLOCK] = kv_of(tokens, position, layer)


ALL_LAYERS = range(LAYOUT.num_layers)


def check_kv(
    pool: ExportedPool,
    table: Sequence[int],
    tokens: Sequence[int],
    span: range,
    layers: range = ALL_LAYERS,
) -> None:
    """Assert that the KV of this span of the tokens is in these blocks."""
    for position in span:
        block = slots(pool, table[position // BLOCK])
        for layer in layers:
            found = block[layer, :, position % BLOCK]
            expected = kv_of(tokens, position, layer)
            assert (found == expected).all(), (
                f"token {position} in layer {layer} is {found[0, 0]:#x}, not {expected:#x}"
            )


class Memory:
    """A pool of bytes, and who owns its blocks."""

    def __init__(self) -> None:
        self.bytes = ExportedPool(NUM_BLOCKS, LAYOUT.block_bytes)
        self.pool = BlockPool(NUM_BLOCKS, BLOCK, bump_generations=self.bytes.bump)

    def reserve(
        self, tokens: Sequence[int], num_tokens: int, num_reusable: int
    ) -> tuple[list[int], int] | None:
        """(block table, reused blocks), the new ones full of scrap; None: no room."""
        hashes = Prompt(tokens).hashes(BLOCK)[:num_reusable]
        reserved = Queues(self.pool, ManualClock(0.0)).reserve(num_tokens, hashes)
        if reserved is not None:
            table, num_reused = reserved
            for block_id in table[num_reused:]:
                self.bytes.data[block_id] = SCRAP
        return reserved

    def publish(self, table: Sequence[int], tokens: Sequence[int], num_tokens: int) -> None:
        hashes = Prompt(tokens).hashes(BLOCK)
        for index in range(num_tokens // BLOCK):
            self.pool.publish(table[index], hashes[index])

    def check_all_free(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == NUM_BLOCKS, "blocks were lost"


class PrefillSide:
    """One life of an exporter: engine-like computing, real handoffs."""

    def __init__(self, loop: SteppedLoop, network: FakeNetwork, life: int) -> None:
        self._loop = loop
        self.memory = Memory()
        kinds = [TransportKind("fake", network.server, network.transport, frozenset({"cpu"}))]
        identity = KvIdentity("a-model", "main", LAYOUT)
        self.exporter = Exporter(
            "p",
            f"life-{life}",
            identity,
            self.memory.bytes,
            ManualClock(0.0),
            kinds,
            tickets=TicketRules(with_checksums=False),  # generations alone must do
        )
        loop.complete(self.exporter.start("127.0.0.1"))
        self.running: dict[str, Request] = {}
        self.handoffs = Handoffs(
            self.exporter,
            self.memory.pool,
            on_settled=self._stop,
            on_failed=self._expired,
            lease_s=LEASE_S,
            announce_bytes=1,
        )

    def start(self, request_id: str, tokens: list[int]) -> None:
        """Admit the prompt, if there is room."""
        reserved = self.memory.reserve(tokens, len(tokens), (len(tokens) - 1) // BLOCK)
        if reserved is None:
            return
        table, num_reused = reserved
        request = Request(
            request_id=request_id,
            prompt=Prompt(tokens),
            sampling=SamplingParams(),
            lifecycle=Lifecycle(received_s=0.0),
            block_table=table,
            num_computed_tokens=num_reused * BLOCK,
            leg_token_limit=1,
        )
        self.running[request_id] = request
        self._loop.do(lambda: self.handoffs.open(request_id))

    def compute(self, request_id: str, num_tokens: int, layer_by_layer: bool) -> None:
        """A step over one chunk, and what the node does in its wake."""
        request = self.running[request_id]
        begin = request.num_computed_tokens
        end = min(begin + num_tokens, request.num_prompt_tokens)
        rows = [Scheduled(request, end - begin)]
        tokens, table = request.prompt_token_ids, request.block_table
        for layer in range(LAYOUT.num_layers):
            write_kv(self.memory.bytes, table, tokens, begin, end, layer)
            is_last = layer + 1 == LAYOUT.num_layers
            if layer_by_layer and not is_last:
                self._loop.do(lambda: self.handoffs.layers_done(rows, 1))
                if request_id not in self.running:
                    return  # settled while the step ran
        request.num_computed_tokens = end
        self.memory.publish(table, tokens, end)
        if end < request.num_prompt_tokens:
            self._loop.do(lambda: self.handoffs.announce(request))
            return
        record = HandoffRecord(request_id=request_id, num_tokens=end, token_ids=[1])
        self._loop.do(lambda: self.handoffs.publish(request, record))
        self._stop(request_id)

    def cancel(self, request_id: str, reason: PdserveError) -> None:
        self._stop(request_id)
        self._loop.do(lambda: self.handoffs.end(request_id, reason))

    def check(self) -> None:
        """What has been computed is still there."""
        for request in self.running.values():
            span = range(request.num_computed_tokens)
            check_kv(self.memory.bytes, request.block_table, request.prompt_token_ids, span)

    def _stop(self, request_id: str) -> None:
        request = self.running.pop(request_id, None)
        if request is not None:
            self.memory.pool.release(request.block_table)

    def _expired(self, request_id: str, error: PdserveError) -> None:
        self._stop(request_id)


class DecodeSide:
    """A puller, and its way to the present life of the exporter."""

    def __init__(self, loop: SteppedLoop, network: FakeNetwork) -> None:
        self._loop = loop
        self.memory = Memory()
        kinds = [TransportKind("fake", network.server, network.transport, frozenset({"cpu"}))]
        identity = KvIdentity("a-model", "main", LAYOUT)
        self.puller = Puller(self.memory.bytes, identity, host_id(), kinds)
        self.link: Link | None = None

    def connect(self, exporter: Exporter) -> None:
        self.link = self._loop.complete(self.puller.connect(exporter.welcome(), 1.0))

    def session(self, link: Link) -> Any:
        """As much of a session as an arrival asks for."""
        return SimpleNamespace(link=link, peer=SimpleNamespace(node_id="p"))
