"""Where a node's KV goes: which pool, and what is refused with which advice."""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch

from kv_transfer.cuda.pinned import PinnedHostBlocks
from kv_transfer.cuda.pool import DevicePool, PrivatePool
from kv_transfer.memory import ExportedPool
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.ranks.hosts import HostShare
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.node.memory.kv_memory import commit_if_asked, engine_buffer, make_kv_memory
from pdserve.node.prefixes.host_tier import Machine, make_tier, make_tier_blocks
from pdserve.node.start.model import NodeModel, plan_model
from pdserve.protocol import NodeRole
from pdserve.settings.config import EngineConfig, NodeConfig
from pdserve.settings.prefixes import PrefixConfig
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.file_lock import file_lock
from pdserve.shared.process.user_cache import cache_folder
from tests.fakes.gpus import FakeHost

ROLES = [NodeRole.PREFILL, NodeRole.DECODE]


@pytest.fixture
def host() -> FakeHost:
    """Its GPUs are this machine's."""
    return FakeHost()


@pytest.fixture(scope="module")
def on_cpu() -> NodeModel:
    return dataclasses.replace(plan_model(NodeConfig()), device=torch.device("cpu"), num_blocks=5)


@pytest.fixture
def on_gpu(on_cpu: NodeModel) -> NodeModel:
    return dataclasses.replace(on_cpu, device=torch.device("cuda:1"))


@pytest.mark.parametrize("role", ROLES)
def test_a_cpu_has_an_exported_pool(on_cpu: NodeModel, role: NodeRole) -> None:
    pool = make_kv_memory(role, on_cpu)
    assert isinstance(pool, ExportedPool)
    buffer = engine_buffer(pool)
    assert isinstance(buffer, np.ndarray)
    assert np.shares_memory(buffer, pool.data)
    pool.close()


class FullPool(ExportedPool):
    """Of a machine that has no memory left."""

    def commit(self) -> bool:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_memory_that_is_not_there_when_it_is_to_be_committed() -> None:
    pool = FullPool(2, 64)
    commit_if_asked(NodeConfig(), pool)
    with pytest.raises(ConfigError, match=r"no memory for 128 bytes of KV: .* lower kv_memory"):
        commit_if_asked(NodeConfig(engine=EngineConfig(kv_commit=True)), pool)
    pool.close()


@pytest.mark.parametrize("role", ROLES)
def test_a_gpu_has_a_pool_that_the_engine_uses_as_it_is(
    host: FakeHost, on_gpu: NodeModel, role: NodeRole
) -> None:
    pool = make_kv_memory(role, on_gpu, host.driver)
    assert isinstance(pool, DevicePool)
    assert (pool.num_blocks, pool.block_bytes) == (5, on_gpu.layout.block_bytes)
    assert pool.driver.device == 1
    assert engine_buffer(pool) is pool
    pool.close()


def test_without_cupy_a_prefill_node_says_what_to_install(
    on_gpu: NodeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"cannot share its KV: .*pip install -e '\.\[cuda\]'"):
        make_kv_memory(NodeRole.PREFILL, on_gpu)


def test_without_cupy_a_decode_node_serves_co_located_only(
    on_gpu: NodeModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with caplog.at_level(logging.WARNING):
        pool = make_kv_memory(NodeRole.DECODE, on_gpu)
    assert isinstance(pool, PrivatePool)
    assert engine_buffer(pool) is None
    assert "no KV can move to or from this node" in caplog.text


def test_a_gpu_without_room(host: FakeHost, on_gpu: NodeModel) -> None:
    host.errors["allocate"] = "out of memory"
    with pytest.raises(ConfigError, match=r"5 blocks on cuda:1: out of memory; lower kv_memory"):
        make_kv_memory(NodeRole.DECODE, on_gpu, host.driver)


# ---- the host tier -----------------------------------------------------------------------------


def tiered(memory: str, **options: str) -> NodeConfig:
    return NodeConfig(prefix=PrefixConfig(tier_memory=memory, **options))


def test_the_tier_of_a_gpu_is_pinned(host: FakeHost, on_gpu: NodeModel) -> None:
    size = on_gpu.layout.block_bytes
    blocks = make_tier_blocks(tiered(str(3 * size + 1)), on_gpu, Machine(host.driver))
    assert isinstance(blocks, PinnedHostBlocks)
    assert blocks.num_blocks == 3
    assert [len(memory) for memory in host.pinned.values()] == [3 * size]


def test_ranks_have_a_place_in_every_slot(host: FakeHost, on_gpu: NodeModel) -> None:
    """Also for heads that several have: a slot is as large as all parts of a block together."""
    model = dataclasses.replace(on_gpu, kernels=None, share=HostShare(Parallelism(4)))
    sizes = [layout.block_bytes for layout in model.rank_layouts]
    assert sum(sizes) == 2 * model.layout.block_bytes
    blocks = make_tier_blocks(tiered(str(3 * sum(sizes))), model, Machine(host.driver))
    assert isinstance(blocks, PinnedHostBlocks)
    assert [region.num_bytes for region in blocks.regions] == [3 * size for size in sizes]
    memory = make_kv_memory(NodeRole.DECODE, model, host.driver)
    tier = make_tier(blocks, memory, BlockPool(memory.num_blocks, 16))
    assert tier is not None
    assert tier.tier.block_bytes == memory.block_bytes
    tier.tier.close()
    memory.close()


def test_without_a_tier_that_cannot_be_pinned_a_node_starts_all_the_same(
    host: FakeHost, on_gpu: NodeModel, caplog: pytest.LogCaptureFixture
) -> None:
    host.most_pinned = 0
    assert make_tier_blocks(tiered("1MiB"), on_gpu, Machine(host.driver)) is None
    assert re.search(r"tier_memory of 1MiB: cannot pin .* lower it", caplog.text)
    small = Machine(host.driver, lambda: 100 << 20, lambda: 320 << 20)
    assert make_tier_blocks(tiered("1GiB"), on_gpu, small) is None
    assert re.search(r"1024MiB are pinned .* 80MiB can be", caplog.text)


def test_nodes_that_start_together_do_not_pin_the_same_memory(
    host: FakeHost, on_gpu: NodeModel
) -> None:
    """Each sees what is there before it pins, and pinning takes a while."""
    both_saw, tiers = threading.Barrier(2), []

    def seen() -> int:
        with suppress(threading.BrokenBarrierError):
            both_saw.wait(0.2)
        return (3 << 20) - sum(map(len, host.pinned.values()))

    def start(_: int) -> bool:
        tiers.append(make_tier_blocks(tiered("2MiB"), on_gpu, machine))
        return tiers[-1] is not None

    machine = Machine(host.driver, seen, lambda: 3 << 20)
    with ThreadPoolExecutor(2) as nodes:
        assert sorted(nodes.map(start, range(2))) == [False, True]


def test_a_node_that_cannot_pin_for_others_says_so(
    host: FakeHost, on_gpu: NodeModel, caplog: pytest.LogCaptureFixture
) -> None:
    hasty = Machine(host.driver, pin_s=0.01)
    folder = cache_folder("host-tier")
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / "pinning.lock", 1.0, lambda: None):
        assert make_tier_blocks(tiered("1MiB"), on_gpu, hasty) is None
    assert "other nodes have been pinning" in caplog.text


def test_a_tier_on_a_gpu_has_no_file(host: FakeHost, on_gpu: NodeModel) -> None:
    with pytest.raises(ConfigError, match="tier_dir '/tmp' is for CPUs"):
        make_tier_blocks(tiered("1MiB", tier_dir="/tmp"), on_gpu, Machine(host.driver))
    assert not host.pinned


def test_without_cupy_there_is_no_tier_on_a_gpu(
    on_gpu: NodeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"takes pinned memory: .*pip install -e '\.\[cuda\]'"):
        make_tier_blocks(tiered("1MiB"), on_gpu)
