"""Pools on a GPU: one allocation, generations that can be shared, a life beyond `close`."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest

from kv_transfer.cuda.pool import DevicePool, PrivatePool, device_pool
from kv_transfer.memory import ExportedPool, map_sealed
from kv_transfer.transports.catalog import KINDS, choose_kinds
from pdserve.shared.errors import ConfigError, PeerLost
from tests.fakes.gpus import FakeHost


def test_generations_are_shared_and_sealed() -> None:
    pool = DevicePool(3, 1000, FakeHost().driver())
    seen = np.frombuffer(map_sealed(os.dup(pool.fd), 24), np.uint64)
    pool.bump([2, 0, 2])
    assert seen.tolist() == pool.generations.tolist() == [1, 0, 2]
    with pytest.raises(ValueError, match="block id"):
        pool.bump([3])
    with pytest.raises(PeerLost, match="sealed pool of 32 bytes"):
        map_sealed(os.dup(pool.fd), 32)
    pool.close()
    pool.close()


def test_the_allocation_is_whole_pages_and_starts_as_zeros() -> None:
    host = FakeHost()
    pool = DevicePool(3, 1000, host.driver())
    memory = host.memory[pool.region.address]
    assert len(memory) == 2 << 20
    assert not memory.any()
    interface = pool.__cuda_array_interface__
    assert interface["shape"] == (3000,)
    assert interface["data"] == (pool.region.address, False)
    pool.close()


def test_the_allocation_lasts_as_long_as_somebody_has_the_pool() -> None:
    host = FakeHost()
    pool = DevicePool(3, 1000, host.driver())
    pool.close()
    assert len(host.memory) == 1
    del pool
    gc.collect()
    assert not host.memory


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(0, 64), (2, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_bytes: int) -> None:
    host = FakeHost()
    with pytest.raises(ValueError, match="cannot be"):
        DevicePool(num_blocks, block_bytes, host.driver())
    assert not host.memory


def test_other_pools_are_no_device_pools() -> None:
    pool = ExportedPool(2, 64)
    with pytest.raises(TypeError, match="ExportedPool"):
        device_pool(pool)
    pool.close()


def test_no_transport_moves_a_private_pool() -> None:
    pool = PrivatePool(2, 64)
    pool.bump([1, 1])
    assert pool.generations.tolist() == [0, 2]
    assert all(kind.obstacle(pool) for kind in KINDS)
    with pytest.raises(ConfigError, match=r"'tcp'.*the pool is private"):
        choose_kinds(["tcp"], pool)


def test_transports_for_gpus_come_before_those_for_any_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [kind.name for kind in KINDS]
    assert [n for n in names if n in ("shm", "cuda_ipc", "nccl", "tcp")] == [
        "shm",
        "cuda_ipc",
        "nccl",
        "tcp",
    ]
    pool = DevicePool(2, 64, FakeHost().driver())
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name in ("cuda_ipc", "nccl"):
        with pytest.raises(ConfigError, match=r"cupy.*pip install -e '\.\[cuda\]'"):
            choose_kinds([name], pool)
    pool.close()
