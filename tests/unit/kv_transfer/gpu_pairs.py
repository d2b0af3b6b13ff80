"""An exporter and a puller with pools on pretended GPUs, linked by a transport for such pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kv_transfer.cuda.pool import DevicePool
from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.links.link import Link
from kv_transfer.puller import Puller, PullResult
from kv_transfer.transports.catalog import TransportKind
from kv_transfer.transports.cuda_ipc import CudaIpcServer, CudaIpcTransport
from kv_transfer.transports.interface import Reader
from kv_transfer.transports.nccl.peer import Endings
from kv_transfer.transports.nccl.puller import NcclTransport
from kv_transfer.transports.nccl.server import NcclServer
from kv_transfer.transports.pull_server import PullLimits
from kv_transfer.transports.tls import NodeTls
from pdserve.kv import KvLayout
from pdserve.shared.clock import ManualClock
from tests import waits
from tests.fakes.gpus import FakeDriver, FakeHost
from tests.unit.kv_transfer.pairs import SMALL

until = partial(waits.until, pause_s=0.0)  # what is looked for may last a moment only
CHUNK_BYTES = 1000  # no multiple of anything
CUDA_IPC = TransportKind("cuda_ipc", CudaIpcServer, CudaIpcTransport, frozenset({"cuda"}))


def nccl(
    stall_s: float = 10.0,
    chunk_bytes: int = CHUNK_BYTES,
    join_s: float = 30.0,
    end_s: float = 5.0,
) -> TransportKind:
    """NCCL whose ends give up after a stall of `stall_s`; the puller, after `end_s` of an end."""
    limits = PullLimits(stall_s=stall_s)
    server = partial(NcclServer, limits=limits, chunk_bytes=chunk_bytes, join_s=join_s)

    def transport(reader: Reader) -> NcclTransport:
        return NcclTransport(reader, stall_s, Endings(end_s))

    return TransportKind("nccl", server, transport, frozenset({"cuda"}))


class DeviceBlocks:
    """A pool on a pretended GPU, and its blocks as a test sees them."""

    def __init__(self, driver: FakeDriver, layout: KvLayout, num_blocks: int, host: FakeHost):
        self.pool = DevicePool(num_blocks, layout.block_bytes, driver)
        memory = host.memory[self.pool.region.address][: self.pool.region.num_bytes]
        self.data: NDArray[np.uint8] = memory.reshape(num_blocks, layout.block_bytes)

    def fill(self, seed: int) -> None:
        self.data[:] = np.random.default_rng(seed).integers(0, 256, self.data.shape, np.uint8)


@dataclass
class GpuPair:
    host: FakeHost
    exporter: Exporter
    puller: Puller
    link: Link
    source: DeviceBlocks
    destination: DeviceBlocks

    async def pull(
        self, ticket: bytes, block_table: Sequence[int], timeout_s: float = waits.WITHIN_S
    ) -> PullResult:
        return await self.puller.pull(self.link, ticket, block_table, 0, timeout_s)

    def issue(self, *block_ids: int) -> bytes:
        """A ticket for these blocks, all of them full."""
        num_tokens = len(block_ids) * self.exporter.layout.block_size
        return self.exporter.issue("r", 0, num_tokens, block_ids)

    @property
    def num_staged(self) -> int:
        """Allocations besides the two pools."""
        return len(self.host.memory) - 2


def make_exporter(
    pool: DevicePool, layout: KvLayout, kinds: Sequence[TransportKind], tls: NodeTls | None = None
) -> Exporter:
    identity = KvIdentity("a-model", "main", layout)
    return Exporter("p0", "life-1", identity, pool, ManualClock(100.0), kinds, tls=tls)


def make_puller(
    pool: DevicePool, layout: KvLayout, kinds: Sequence[TransportKind], tls: NodeTls | None = None
) -> Puller:
    return Puller(pool, KvIdentity("a-model", "main", layout), host_id(), kinds, tls=tls)


@asynccontextmanager
async def open_gpu_pair(
    *kinds: TransportKind,
    layout: KvLayout = SMALL,
    destination_layout: KvLayout | None = None,
    num_blocks: int = 16,
    tls: NodeTls | None = None,
    host: FakeHost | None = None,
) -> AsyncIterator[GpuPair]:
    """Afterwards no lane, mapping or staging memory is left."""
    destination_layout = destination_layout or layout
    host = host or FakeHost()
    source = DeviceBlocks(host.driver(0), layout, num_blocks, host)
    source.fill(seed=1)
    destination = DeviceBlocks(host.driver(1), destination_layout, num_blocks, host)
    exporter = make_exporter(source.pool, layout, kinds, tls)
    puller = make_puller(destination.pool, destination_layout, kinds, tls)
    await exporter.start("127.0.0.1")
    link = await puller.connect(exporter.welcome(), waits.WITHIN_S)
    pair = GpuPair(host, exporter, puller, link, source, destination)
    try:
        yield pair
    finally:
        host.let(copies=True, sends=True, aborts=True, opens=True)
        await link.close()
        await puller.close()
        await exporter.close()
        source.pool.close()
        destination.pool.close()
    assert (pair.num_staged, host.num_lanes, host.num_opened) == (0, 0, 0)


def start(pair: GpuPair) -> asyncio.Task[object]:
    """A pull of blocks 3 and 5 into 7 and 9."""
    return asyncio.create_task(pair.pull(pair.issue(3, 5), [7, 9]))


async def assert_still(blocks: DeviceBlocks) -> None:
    """Nobody writes to the pool."""
    blocks.data[:] = 0xEE
    await asyncio.sleep(0.05)
    assert (blocks.data == 0xEE).all()
