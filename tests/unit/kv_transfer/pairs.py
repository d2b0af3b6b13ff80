"""An exporter and a puller in one process, linked by a transport of the test's choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from kv_transfer.exporter import Exporter, TicketRules
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.links.link import Link
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller, PullResult
from kv_transfer.transports.catalog import KINDS, TransportKind
from kv_transfer.transports.tls import NodeTls
from kv_transfer.transports.ucx.agent import missing as ucx_missing
from pdserve.kv import KvDtype, KvLayout
from pdserve.shared.clock import ManualClock
from pdserve.shared.simulated_link import SimulatedLink
from tests.fakes.coded_tcp import coded_tcp
from tests.fakes.transport import FakeNetwork
from tests.waits import WITHIN_S

NEEDS_NIXL = pytest.mark.skipif(ucx_missing() is not None, reason=str(ucx_missing()))
REAL_TRANSPORTS = ("shm", "tcp", pytest.param("ucx", marks=NEEDS_NIXL))
TRANSPORTS = (*REAL_TRANSPORTS, "coded", "fake")
# For what is not of a transport: the others are long.
OTHERS = (pytest.param("ucx", marks=(NEEDS_NIXL, pytest.mark.long)),)
REAL_BY_DEFAULT = ("shm", "tcp", *OTHERS)
BY_DEFAULT = (*REAL_BY_DEFAULT, pytest.param("coded", marks=pytest.mark.long), "fake")
SMALL = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype=KvDtype.FLOAT32)
# Blocks of 1 MiB: naming one of them tens of thousands of times makes a pull that lasts for
# seconds on any machine, with two blocks of memory.
LARGE = KvLayout(num_layers=4, num_kv_heads=4, head_dim=128, block_size=64, dtype=KvDtype.FLOAT32)
ENDLESS_BLOCKS = 60_000


@dataclass
class Pair:
    exporter: Exporter
    puller: Puller
    link: Link
    source: ExportedPool
    destination: ExportedPool
    clock: ManualClock
    network: FakeNetwork

    async def pull(
        self,
        ticket: bytes,
        block_table: Sequence[int],
        from_token: int = 0,
        timeout_s: float = WITHIN_S,
    ) -> PullResult:
        return await self.puller.pull(self.link, ticket, block_table, from_token, timeout_s)

    def issue_endless(self) -> bytes:
        """A ticket whose pull into `endless_table` takes as good as for ever."""
        num_tokens = ENDLESS_BLOCKS * self.exporter.layout.block_size
        return self.exporter.issue("endless", 0, num_tokens, [1] * ENDLESS_BLOCKS)

    @property
    def endless_table(self) -> list[int]:
        return [2] * ENDLESS_BLOCKS


def make_pool(layout: KvLayout, num_blocks: int, seed: int | None = None) -> ExportedPool:
    """A pool of random bytes, or of zeros without a seed."""
    pool = ExportedPool(num_blocks, layout.block_bytes)
    if seed is not None:
        rng = np.random.default_rng(seed)
        pool.data[:] = rng.integers(0, 256, pool.data.shape, dtype=np.uint8)
    return pool


def tokens_of(
    pool: ExportedPool, layout: KvLayout, block_table: Sequence[int], begin: int, end: int
) -> NDArray[np.uint8]:
    """[tokens, num_layers, num_planes, num_kv_heads, bytes of head_dim]: read token by token."""
    rows = (layout.num_layers, len(layout.planes), layout.num_kv_heads, layout.block_size, -1)
    blocks = [pool.data[block_id].reshape(rows) for block_id in block_table]
    size = layout.block_size
    return np.stack([blocks[token // size][:, :, :, token % size] for token in range(begin, end)])


def make_exporter(
    pool: ExportedPool,
    layout: KvLayout,
    kind: str = "tcp",
    network: FakeNetwork | None = None,
    *,
    with_checksums: bool = True,
    tls: NodeTls | None = None,
    windows: tuple[int | None, ...] = (),
) -> tuple[Exporter, ManualClock]:
    clock = ManualClock(100.0)
    network = network or FakeNetwork()
    identity = KvIdentity("a-model", "main", layout, windows=windows)
    kinds = [k for k in kinds_with(network) if k.name == kind]
    with_checksums &= layout != LARGE  # gigabytes are pulled of it
    exporter = Exporter(
        "p0",
        "life-1",
        identity,
        pool,
        clock,
        kinds,
        tickets=TicketRules(with_checksums=with_checksums),
        tls=tls,
    )
    return exporter, clock


def make_puller(
    pool: ExportedPool,
    layout: KvLayout,
    network: FakeNetwork | None = None,
    tls: NodeTls | None = None,
    simulated: SimulatedLink | None = None,
    codec: str = "zstd",
) -> Puller:
    network = network or FakeNetwork()
    identity = KvIdentity("a-model", "main", layout)
    kinds = kinds_with(network, codec)
    return Puller(pool, identity, host_id(), kinds, tls=tls, simulated=lambda exporter: simulated)


def kinds_with(network: FakeNetwork, codec: str = "zstd") -> list[TransportKind]:
    """All transports, TCP with a codec, and the fake one."""
    fake = TransportKind("fake", network.server, network.transport, frozenset({"cpu"}))
    return [*KINDS, coded_tcp(codec), fake]


@asynccontextmanager
async def open_pair(
    kind: str,
    layout: KvLayout = SMALL,
    destination_layout: KvLayout | None = None,
    num_blocks: int = 32,
    *,
    with_checksums: bool = True,
    tls: NodeTls | None = None,
    simulated: SimulatedLink | None = None,
    codec: str = "zstd",
) -> AsyncIterator[Pair]:
    """A pair over this kind of transport; `codec` is that of the one named "coded"."""
    destination_layout = destination_layout or layout
    network = FakeNetwork()
    source = make_pool(layout, num_blocks, seed=1)
    destination = make_pool(destination_layout, num_blocks)
    exporter, clock = make_exporter(
        source, layout, kind, network, with_checksums=with_checksums, tls=tls
    )
    puller = make_puller(destination, destination_layout, network, tls, simulated, codec)
    await exporter.start("127.0.0.1")
    link = await puller.connect(exporter.welcome(), WITHIN_S)
    assert link.transport == kind
    try:
        yield Pair(exporter, puller, link, source, destination, clock, network)
    finally:
        await link.close()
        await puller.close()
        await exporter.close()
        source.close()
        destination.close()


@asynccontextmanager
async def endless_pull(
    pair: Pair, timeout_s: float = WITHIN_S
) -> AsyncIterator[asyncio.Task[PullResult]]:
    """A pull in the middle of its transfer; whatever ends it, its blocks are still afterwards."""
    task = asyncio.create_task(pair.pull(pair.issue_endless(), pair.endless_table, 0, timeout_s))
    await first_bytes(pair.destination, 2)
    assert not task.done()
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
    await assert_still(pair.destination)


async def first_bytes(pool: ExportedPool, block_id: int) -> None:
    """Until native code has written to a block of zeros (it tells nobody, so look)."""
    async with asyncio.timeout(WITHIN_S):
        while not pool.data[block_id].any():
            await asyncio.sleep(0)


async def assert_still(pool: ExportedPool) -> None:
    """Nobody writes to the pool."""
    pool.data[:] = 0xEE
    await asyncio.sleep(0.05)
    assert (pool.data == 0xEE).all()
