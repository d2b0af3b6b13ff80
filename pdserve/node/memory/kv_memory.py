"""Allocates a node's KV pool, on the device that computes, so that other nodes can pull from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kv_transfer.cuda.catalog import open_driver
from kv_transfer.cuda.driver import DeviceError, Driver
from kv_transfer.cuda.pool import DevicePool, PrivatePool
from kv_transfer.hosts.part_elsewhere import PartElsewhere
from kv_transfer.memory import ExportedPool, KvPool
from kv_transfer.sharded_pool import ShardedPool, parts_of
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.cache import DeviceBuffer
from pdserve.node.memory.growth import MemoryGrowth
from pdserve.node.start.model import NodeModel
from pdserve.protocol import NodeRole
from pdserve.settings.config import NodeConfig
from pdserve.shared.errors import ConfigError, TransportUnavailable

log = logging.getLogger(__name__)


OpenDriver = Callable[[int], Driver]  # device |-> what it does for this process


def make_kv_memory(
    role: NodeRole,
    model: NodeModel,
    open_driver: OpenDriver = open_driver,
    *,
    gives_back: bool = False,
) -> KvPool:
    """Allocate the memory of a node's KV blocks; one that `gives_back` some shares it with others.

    Raises:
        ConfigError: no room for the pool; or the GPU lacks what KV transfer takes, and the role
            requires KV transfer.
    """
    if gives_back:  # the kernel would cut no memory that others may not write to
        return ExportedPool(model.num_blocks, model.layout.block_bytes, is_sealed=False)
    if model.device.type == "cpu":
        return parts_memory(model)
    try:
        return parts_memory(model, open_driver)
    except TransportUnavailable as error:
        if role is NodeRole.PREFILL:
            raise ConfigError(
                f"a prefill node on {model.device} cannot share its KV: {error}; or use --device "
                "cpu, or --mode colocated, where no KV moves"
            ) from error
        log.warning("no KV can move to or from this node: %s", error)
        return PrivatePool(model.num_blocks, model.layout.block_bytes)


def parts_memory(model: NodeModel, open_driver: OpenDriver = open_driver) -> KvPool:
    """Allocate the parts of a node's pool that this host has; there may be parts elsewhere.

    Raises:
        ConfigError: there is no room for them.
        TransportUnavailable: a GPU lacks what KV transfer takes.
    """
    num_blocks, here, is_cpu = model.num_blocks, model.parts_here, model.device.type == "cpu"
    parts: list[KvPool] = []
    try:
        for number, layout in enumerate(model.rank_layouts):
            size = layout.block_bytes
            if number not in here:
                parts.append(PartElsewhere("cpu" if is_cpu else "cuda", num_blocks, size))
            elif is_cpu:
                is_sealed = model.share.is_alone
                parts.append(ExportedPool(num_blocks, size, is_sealed=is_sealed))
            else:
                # A device without an index is torch's current device, which is always 0 here.
                device = model.device_of_rank(number - here.start).index or 0
                parts.append(DevicePool(num_blocks, size, open_driver(device)))
    except DeviceError as error:
        raise ConfigError(
            f"no KV pool of {num_blocks} blocks on {model.device}: {error}; lower kv_memory"
        ) from error
    return parts[0] if len(parts) == 1 else ShardedPool(parts)


def prefill_refusal(config: NodeConfig, memory: KvPool) -> str:
    """Why a node with this config and memory cannot be a prefill node; empty: it can."""
    if config.multiplexed:
        return "it computes both phases itself, beside each other (multiplexed)"
    if memory.kind == "private":
        return "its KV is in memory that no other node can read"
    return ""


def commit_if_asked(config: NodeConfig, memory: KvPool) -> None:
    """Allocate all memory of a CPU pool now, if the config says so. Slow, so for a thread.

    Otherwise memory is allocated as needed (`growth.py`). The pool works without huge pages
    too, so a kernel that has none only causes a warning.

    Raises:
        ConfigError: there is not enough memory.
    """
    if not config.engine.kv_commit or not isinstance(memory, ExportedPool):
        return
    try:
        is_huge = memory.commit()
    except OSError as error:
        raise ConfigError(
            f"kv_commit: no memory for {memory.flat.nbytes} bytes of KV: {error}; lower kv_memory"
        ) from error
    if not is_huge:
        log.warning("kv_commit: this kernel has no huge pages for shared memory")


async def begin_memory(config: NodeConfig, memory: KvPool, pool: BlockPool) -> None:
    """Allocate all of a node's KV memory now, if the config says so, or as its blocks are used.

    Raises:
        ConfigError: as commit_if_asked.
    """
    await asyncio.to_thread(commit_if_asked, config, memory)
    if isinstance(memory, ExportedPool) and not config.engine.kv_commit:
        growth = MemoryGrowth(memory)
        await growth.begin()
        pool.on_first_use(growth.used)


def engine_buffer(memory: KvPool) -> NDArray[np.uint8] | DeviceBuffer | None:
    """The memory for the engine's KV cache; None: the engine allocates it itself.

    Of a pool in parts it is that of rank 0.
    """
    match parts_of(memory)[0]:
        case ExportedPool() as pool:
            return pool.flat
        case DevicePool() as pool:
            return pool
        case _:
            return None
