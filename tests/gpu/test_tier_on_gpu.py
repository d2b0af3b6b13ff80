"""The host tier of a real GPU: pinned memory, beside a model that computes. Skipped without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from kv_transfer.cuda.catalog import missing, open_driver
from kv_transfer.cuda.copier import HOST_COPIES
from kv_transfer.cuda.driver import DeviceError, Driver
from kv_transfer.cuda.pinned import PinnedCopies, PinnedHostBlocks
from kv_transfer.cuda.pool import DevicePool
from kv_transfer.tier import HostTier
from pdserve.engine.cuda.capture.recorder import CudaRecorder
from pdserve.engine.kv.cache import KvCache
from pdserve.kv import KvDtype, KvLayout

if not torch.cuda.is_available():
    pytestmark = pytest.mark.skip(reason="needs an NVIDIA GPU")
else:
    pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

CUDA = torch.device("cuda", 0)
LARGE = KvLayout(
    num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype=KvDtype.BFLOAT16
)  # blocks of 2 MiB, as of Llama-3-8B
SMALL = KvLayout(num_layers=2, num_kv_heads=1, head_dim=24, block_size=3, dtype=KvDtype.FLOAT16)
NUM_BLOCKS, NUM_SLOTS = 96, 64
HASHES = [number.to_bytes(16) for number in range(NUM_SLOTS)]


class Bench:
    """A pool of random numbers, and a tier of pinned memory."""

    def __init__(self, layout: KvLayout, driver: Driver) -> None:
        self.pool = DevicePool(NUM_BLOCKS, layout.block_bytes, driver)
        self.blocks = KvCache(layout, NUM_BLOCKS, CUDA, self.pool).pool
        self.blocks.normal_()
        torch.cuda.synchronize(CUDA)
        self.pinned = PinnedHostBlocks(NUM_SLOTS, [layout.block_bytes], driver)
        self.tier = HostTier(NUM_SLOTS, [PinnedCopies(self.pool, self.pinned)])

    def close(self) -> None:
        self.tier.close()
        self.pool.close()


@pytest_asyncio.fixture(params=["batches", "one-by-one"])
async def driver(request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    driver = open_driver(0)
    if request.param == "one-by-one":
        driver._batch = None  # type: ignore[attr-defined]
    elif not driver.batches_copies:
        pytest.skip("needs CUDA 13's driver")
    yield driver


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
async def test_blocks_come_back_as_they_were(driver: Driver, layout: KvLayout) -> None:
    """More of the large ones than go in a batch, among a model's products."""
    bench = Bench(layout, driver)
    before = bench.blocks[:NUM_SLOTS].clone()
    factor = torch.randn(2048, 2048, device=CUDA)
    torch.cuda.synchronize(CUDA)
    assert NUM_SLOTS * LARGE.block_bytes > 2 * HOST_COPIES.engine_bytes, "several batches"

    def compute() -> None:
        product = factor
        for _ in range(50):
            product = torch.tanh(product @ factor)

    compute()
    await bench.tier.store(HASHES, range(NUM_SLOTS))
    bench.blocks.zero_()
    torch.cuda.synchronize(CUDA)
    compute()
    await bench.tier.load(HASHES, range(NUM_BLOCKS - 1, NUM_BLOCKS - 1 - NUM_SLOTS, -1))
    assert torch.equal(bench.blocks.flip(0)[:NUM_SLOTS], before)
    assert not bench.blocks[: NUM_BLOCKS - NUM_SLOTS].any()
    bench.close()


@pytest.mark.parametrize("verb", ["store", "load"])
async def test_after_a_cancellation_nothing_is_copied(driver: Driver, verb: str) -> None:
    bench = Bench(LARGE, driver)
    if verb == "load":
        await bench.tier.store(HASHES, range(NUM_SLOTS))
        bench.blocks.zero_()
        torch.cuda.synchronize(CUDA)
    copying = asyncio.create_task(getattr(bench.tier, verb)(HASHES, range(NUM_SLOTS)))
    await asyncio.sleep(0.001)
    copying.cancel()
    await asyncio.gather(copying, return_exceptions=True)
    bench.blocks.fill_(7.0)
    torch.cuda.synchronize(CUDA)
    await asyncio.sleep(0.1)
    assert (bench.blocks == 7.0).all()
    assert bench.tier.num_held + len(bench.tier._free) == NUM_SLOTS
    bench.close()


def test_copies_of_the_tier_give_way_to_decodes() -> None:
    """A lower number is a higher priority."""
    bench = Bench(SMALL, open_driver(0))
    (copies,) = bench.tier._parts
    assert isinstance(copies, PinnedCopies)
    lane = copies._copier._take()
    stream = lane._stream  # type: ignore[attr-defined]
    recorder = CudaRecorder(CUDA)
    least, greatest = recorder._stream.priority_range()
    assert stream.priority == least
    assert recorder._stream.priority < least or least == greatest
    lane.close()
    bench.close()


def test_what_cannot_be_pinned_is_an_error() -> None:
    with pytest.raises(DeviceError, match="cannot pin"):
        open_driver(0).pin(1 << 50)
