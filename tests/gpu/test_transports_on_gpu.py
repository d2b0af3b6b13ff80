"""KV between real GPUs: the driver, and pulls from another process. Skipped where there is none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from kv_transfer.cuda.catalog import missing, nccl_missing, open_driver
from kv_transfer.cuda.copier import CopySizes, SpanCopier
from kv_transfer.cuda.driver import Driver, Region
from kv_transfer.cuda.pool import DevicePool
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.links.link import Link
from kv_transfer.puller import Puller
from kv_transfer.threads import CancelFlag
from kv_transfer.transports.catalog import choose_kinds
from pdserve.engine.cuda.capture.recorder import CudaRecorder
from pdserve.engine.kv.cache import KvCache
from pdserve.shared.errors import PeerLost, StaleTicket
from tests.gpu.gpu_exporter_process import (
    LAYOUT,
    NUM_BLOCKS,
    NUM_TOKENS,
    Started,
    seed,
)

ROOT = Path(__file__).parents[2]
WIDER = msgspec.structs.replace(LAYOUT, block_size=32)

if not torch.cuda.is_available():
    pytestmark = pytest.mark.skip(reason="needs an NVIDIA GPU")
else:
    pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or nccl_missing() is not None,
    reason="NCCL refuses two processes on one GPU: needs two, and the library",
)


@pytest.fixture
def driver() -> Driver:
    return open_driver(0)


def view(driver: Driver, address: int, num_bytes: int) -> torch.Tensor:
    """uint8[num_bytes], without a copy."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), device=torch.device("cuda", driver.device))


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("span_bytes", [3, 256, 4096 + 16, 3 << 20])
def test_spans_of_every_size_are_copied(driver: Driver, span_bytes: int, by_engine: bool) -> None:
    """By the kernel and by the copy engines; aligned and not."""
    if by_engine and not driver.batches_copies:
        pytest.skip("needs CUDA 13's driver")
    count, size = 9, 16 * (span_bytes + 64)
    addresses = [driver.allocate(size) for _ in range(2)]
    source, destination = (view(driver, address, size) for address in addresses)
    source.copy_(torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, np.uint8)))
    torch.cuda.synchronize()
    rng = np.random.default_rng(1)
    offsets = rng.permutation(16)[:count] * (span_bytes + 64), np.arange(count) * (span_bytes + 64)
    spans = np.stack([*offsets, np.full(count, span_bytes)], axis=1).astype(np.int64)
    spans[::2, 0] += 16
    spans[::3, 1] += 5
    copier = SpanCopier(driver, CopySizes(min_engine_bytes=0 if by_engine else 1 << 40))
    regions = [Region(address, size) for address in addresses]
    copier.copy(regions[1], regions[0], spans, CancelFlag())
    expected = np.zeros(size, np.uint8)
    for a, b, n in spans.tolist():
        expected[b : b + n] = source[a : a + n].cpu().numpy()
    np.testing.assert_array_equal(destination.cpu().numpy(), expected)
    copier.close()
    for address in addresses:
        driver.free(address)


def test_copies_give_way_to_decodes(driver: Driver) -> None:
    """A lower number is a higher priority."""
    lane = driver.open_lane()
    recorder = CudaRecorder(torch.device("cuda", driver.device))
    least, greatest = recorder._stream.priority_range()
    assert lane._stream.priority == least
    assert recorder._stream.priority < least or least == greatest
    lane.close()


def test_the_engine_lays_its_cache_over_the_pool(driver: Driver) -> None:
    pool = DevicePool(NUM_BLOCKS, LAYOUT.block_bytes, driver)
    cache = KvCache(LAYOUT, NUM_BLOCKS, torch.device("cuda:0"), pool)
    assert cache.pool.data_ptr() == pool.region.address
    assert not cache.pool.any()
    pool.close()


def test_a_cache_on_another_device_is_refused(driver: Driver) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = DevicePool(NUM_BLOCKS, LAYOUT.block_bytes, driver)
    with pytest.raises(ValueError, match="is not on cuda:1"):
        KvCache(LAYOUT, NUM_BLOCKS, torch.device("cuda:1"), pool)
    pool.close()


@dataclass
class Peer:
    process: subprocess.Popen[bytes]
    started: Started
    puller: Puller
    link: Link
    cache: KvCache

    async def pull(self, ticket: bytes) -> None:
        num_blocks = self.cache.layout.blocks_for(NUM_TOKENS)
        await self.puller.pull(self.link, ticket, list(range(3, 3 + num_blocks)), 0, 20)

    def tokens(self, cache: KvCache, first: int, step: int) -> torch.Tensor:
        """[layers, 2, heads, NUM_TOKENS, head_dim] of a request whose blocks begin at `first`."""
        ids = [first + step * i for i in range(cache.layout.blocks_for(NUM_TOKENS))]
        blocks = cache.pool[ids].permute(1, 2, 3, 0, 4, 5)
        return blocks.flatten(3, 4)[:, :, :, :NUM_TOKENS].cpu()


def spawn(kind: str, device: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.gpu_exporter_process", kind, str(device)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@asynccontextmanager
async def linked(kind: str, layout, devices: tuple[int, int]) -> AsyncIterator[Peer]:
    process = spawn(kind, devices[0])
    with process:
        try:
            assert process.stdout is not None
            started = msgspec.json.decode(process.stdout.readline(), type=Started)
            pool = DevicePool(NUM_BLOCKS, layout.block_bytes, open_driver(devices[1]))
            cache = KvCache(layout, NUM_BLOCKS, torch.device("cuda", devices[1]), pool)
            identity = KvIdentity("a-model", "main", layout)
            puller = Puller(pool, identity, host_id(), choose_kinds([kind], pool))
            link = await puller.connect(started.welcome, timeout_s=60)
            assert link.transport == kind
            yield Peer(process, started, puller, link, cache)
            await link.close()
            await puller.close()
            pool.close()
        finally:
            process.kill()


async def check_pulls(kind: str, layout, devices: tuple[int, int]) -> None:
    async with linked(kind, layout, devices) as peer:
        expected = KvCache(LAYOUT, NUM_BLOCKS, torch.device("cuda", devices[1]))
        seed(expected)
        for _ in range(3):
            peer.cache.pool.zero_()
            torch.cuda.synchronize(devices[1])
            await peer.pull(peer.started.fresh)
            there, here = peer.tokens(expected, 40, -1), peer.tokens(peer.cache, 3, 1)
            assert torch.equal(there, here)
        with pytest.raises(StaleTicket):
            await peer.pull(peer.started.stale)


@pytest.mark.parametrize("layout", [LAYOUT, WIDER])
async def test_cuda_ipc_between_two_processes_on_one_gpu(layout) -> None:
    await check_pulls("cuda_ipc", layout, (0, 0))


@TWO_GPUS
@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])
async def test_between_two_gpus(kind: str) -> None:
    await check_pulls(kind, WIDER, (0, 1))


async def test_an_exporter_that_was_killed_is_not_believed() -> None:
    async with linked("cuda_ipc", LAYOUT, (0, 0)) as peer:
        peer.process.kill()
        peer.process.wait()
        with pytest.raises(PeerLost):
            await peer.pull(peer.started.fresh)


@TWO_GPUS
async def test_an_nccl_exporter_that_was_killed_ends_the_pull() -> None:
    async with linked("nccl", LAYOUT, (0, 1)) as peer:
        peer.process.kill()
        await asyncio.to_thread(peer.process.wait)
        with pytest.raises(PeerLost):
            await peer.pull(peer.started.fresh)
