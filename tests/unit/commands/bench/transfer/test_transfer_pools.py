"""Pools of the transfer benchmark, on CPUs and on pretended GPUs, and its two ends over them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TypeVar

import numpy as np
import pytest

from kv_transfer.cuda.driver import Driver
from kv_transfer.cuda.pool import device_pool
from kv_transfer.sharded_pool import parts_of
from pdserve.commands.bench.transfer.config import TransferConfig
from pdserve.commands.bench.transfer.ends import LAYER_BYTES, ExporterEnd, PoolPlan, PullerEnd
from pdserve.commands.bench.transfer.measurement import PullCase, measure_transport
from pdserve.commands.bench.transfer.pools import BenchPool, content, filled_pool
from pdserve.commands.bench.transfer.wire import BenchMessage, Request
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.shared.errors import ConfigError, CorruptTransfer
from tests.fakes.gpus import FakeHost
from tests.matrix import matrix
from tests.unit.kv_transfer.gpu_pairs import CUDA_IPC

R = TypeVar("R", bound=BenchMessage)

NUM_BLOCKS, BLOCK_BYTES = 7, 8192


@pytest.fixture
def host() -> Iterator[FakeHost]:
    """Its GPUs are this machine's."""
    host = FakeHost()
    yield host
    assert not host.pinned
    assert host.num_lanes == 0


@pytest.fixture(params=["cpu", "cuda:1", "parts"])
def pool(request: pytest.FixtureRequest, host: FakeHost) -> Iterator[BenchPool]:
    if request.param == "parts":  # of which each is as large as the others' pools
        device, parts = "cuda", [BLOCK_BYTES] * 2
    else:
        device, parts = request.param, [BLOCK_BYTES]
    pool = filled_pool(NUM_BLOCKS, parts, device, host.driver, staged_bytes=3 * BLOCK_BYTES)
    yield pool
    pool.close()


def test_the_content_is_the_same_everywhere_and_no_two_pages_are_equal(pool: BenchPool) -> None:
    found = np.stack([pool.block(i) for i in range(NUM_BLOCKS)])
    expected = content(range(NUM_BLOCKS), BLOCK_BYTES)
    for part in np.split(found, found.shape[1] // BLOCK_BYTES, axis=1):
        assert (part == expected).all()
        assert len(np.unique(part.reshape(-1, 4096), axis=0)) == NUM_BLOCKS * 2


def test_cleared_blocks_are_zeros_and_others_are_not_touched(pool: BenchPool) -> None:
    pool.clear([0, 5])
    for number in range(NUM_BLOCKS):
        assert pool.block(number).any() == (number not in (0, 5))


def test_a_plain_copy_moves_as_many_bytes(host: FakeHost) -> None:
    for device in ("cpu", "cuda:0"):
        source, into = (
            filled_pool(NUM_BLOCKS, [BLOCK_BYTES], device, host.driver) for _ in range(2)
        )
        into.clear(range(NUM_BLOCKS))
        assert into.copy_from(source, [4, 2], [1, 0]) > 0
        assert sum(into.block(number).any() for number in range(NUM_BLOCKS)) == 2
        source.close()
        into.close()


def test_a_gpu_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match=r"--devices cuda:3: .*pip install -e '\.\[cuda\]'"):
        filled_pool(1, [BLOCK_BYTES], "cuda:3")


def test_one_device_is_for_both() -> None:
    assert TransferConfig(devices=["cuda:2"]).both_devices == ("cuda:2", "cuda:2")
    assert TransferConfig(devices=["cuda:0", "cuda:1"]).both_devices == ("cuda:0", "cuda:1")


class Direct:
    """An end without a process around it."""

    has_huge_pages = False

    def __init__(self, end: ExporterEnd | PullerEnd) -> None:
        self._end = end

    async def ask(self, request: Request, reply: type[R]) -> R:
        found = await self._end.answer(request)
        assert isinstance(found, reply)
        return found


@pytest.mark.parametrize(
    "parallelism",
    matrix([Parallelism(), Parallelism(2), Parallelism(1, 2), Parallelism(2, 2)], 1),
    ids=str,
)
async def test_pulls_between_gpus_are_verified_and_measured(
    host: FakeHost, parallelism: Parallelism
) -> None:
    """Of three layers, which two stages cannot divide evenly."""
    devices, num_parts = ("cuda:0", "cuda:4"), parallelism.num_ranks
    case = PullCase("loopback", 3 * LAYER_BYTES, 6, [2, 4], 5.0, False, devices, parallelism)
    exporter, puller = (
        end(
            PoolPlan(
                num_blocks=6,
                block_bytes=3 * LAYER_BYTES,
                device=device,
                parallelism=parallelism,
                commit=False,
            ),
            [CUDA_IPC],
            host.driver,
        )
        for end, device in zip((ExporterEnd, PullerEnd), devices, strict=True)
    )
    ask = partial(measure_transport, Direct(exporter), Direct(puller), "cuda_ipc", case)
    try:
        rows = await ask("127.0.0.1")
        assert isinstance(rows, list)
        assert [(row.blocks, row.devices, row.parts) for row in rows] == [
            (2, devices, num_parts),
            (4, devices, num_parts),
        ]
        assert all(row.memcpy_gb_per_s > 0 for row in rows)
        assert {driver.device for driver in drivers(exporter)} == set(range(num_parts))
        exporter._pool.clear([3])
        with pytest.raises(CorruptTransfer, match="block 3 of the exporter"):
            await ask("127.0.0.1")
    finally:
        await puller.close()
        await exporter.close()


def drivers(end: ExporterEnd) -> list[Driver]:
    return [device_pool(part).driver for part in parts_of(end._pool.pool)]
