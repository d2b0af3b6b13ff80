"""The driver over cupy, as far as it can be seen without a GPU: what it asks CUDA for, and when."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from kv_transfer.cuda.catalog import missing, open_driver
from kv_transfer.cuda.driver import DeviceError
from kv_transfer.cuda.pinned import PinnedCopies, PinnedHostBlocks
from kv_transfer.cuda.pool import DevicePool
from kv_transfer.spans.plan import Spans
from kv_transfer.threads import CancelFlag
from tests.fakes.cupy import DEFAULT_KIND, PORTABLE, FakeCuda, installed


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def module(cuda: FakeCuda) -> Iterator[ModuleType]:
    """CUDA's driver has batches, which copy like single copies do."""
    with installed(cuda) as module:
        module.__dict__["engine_batch"] = lambda: FakeBatch(cuda)
        yield module


class FakeBatch:
    """As EngineBatch."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def queue(self, destination: int, source: int, spans: Spans, stream: int) -> None:
        self._cuda.check()
        for from_offset, to_offset, num_bytes in spans.tolist():
            job = (destination + to_offset, source + from_offset, num_bytes)
            self._cuda.stream(stream).work.append(lambda job=job: ctypes.memmove(*job))


class Refused(FakeBatch):
    """What CUDA's driver does not do for this GPU."""

    def queue(self, destination: int, source: int, spans: Spans, stream: int) -> None:
        raise DeviceError("CUDA's error 801")


def test_batches_are_tried_before_they_are_relied_on(module: ModuleType, cuda: FakeCuda) -> None:
    assert missing() is None
    driver = open_driver(1)
    assert driver.batches_copies
    assert len(cuda.streams) == 1
    assert not cuda.memory, "neither the probe nor its lane has left anything"
    assert (driver.device, driver.bus_id) == (1, "0000:01:00.0")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("old", "older than 13.0"),
        ("refused", "CUDA's error 801"),
        ("failed", "an illegal instruction"),
    ],
)
def test_without_batches_a_kernel_copies_and_a_warning_says_why(
    module: ModuleType, cuda: FakeCuda, how: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "failed":  # only when it is waited for
        cuda.wait_error = reason
    else:
        module.__dict__["engine_batch"] = lambda: None if how == "old" else Refused(cuda)
    with caplog.at_level(logging.WARNING):
        assert not open_driver(0).batches_copies
    assert "a kernel makes all copies of KV: " in caplog.text
    assert reason in caplog.text
    assert not cuda.memory


def test_lanes_are_beside_the_model_and_below_it(module: ModuleType, cuda: FakeCuda) -> None:
    """Non-blocking: they do not wait for CUDA's default stream. 0 is the lowest priority."""
    lane = open_driver(0).open_lane()
    assert cuda.streams[-1].options == {"non_blocking": True, "priority": 0}
    lane.close()
    assert not cuda.memory


@pytest.mark.parametrize("batches_copies", [True, False])
def test_what_is_stored_in_pinned_memory_comes_back(
    module: ModuleType, cuda: FakeCuda, batches_copies: bool
) -> None:
    if not batches_copies:
        module.__dict__["engine_batch"] = lambda: None
    driver = open_driver(1)
    pool = DevicePool(6, 64, driver)
    memory = cuda.memory[pool.region.address][: 6 * 64].reshape(6, 64)
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.shape, np.uint8)
    before = memory.copy()
    blocks = PinnedHostBlocks(4, [64], driver)
    copies = PinnedCopies(pool, blocks)
    copies.store(np.array([(0, 64, 64), (128, 0, 64)], np.int64), CancelFlag())
    memory[:3] = 0
    copies.load(np.array([(64, 320, 64), (0, 256, 64)], np.int64), CancelFlag())
    assert (memory[[5, 4]] == before[[0, 2]]).all()
    assert cuda.pin_flags == [PORTABLE]
    assert set(cuda.kinds) <= {DEFAULT_KIND}
    assert len(cuda.kinds) == (0 if batches_copies else 4)
    copies.close()
    pool.close()
    del copies, blocks, pool
    gc.collect()
    assert not cuda.memory
    assert not cuda.pinned


def test_what_cuda_cannot_pin_is_an_error_that_says_how_much(
    module: ModuleType, cuda: FakeCuda
) -> None:
    driver = open_driver(1)
    cuda.pin_error = "cudaErrorMemoryAllocation: out of memory"
    with pytest.raises(DeviceError, match=r"cannot pin 4096 bytes .* GPU 1: .*out of memory"):
        driver.pin(4096)
