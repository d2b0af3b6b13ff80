"""Nodes whose ranks have pools of their own, as on GPUs; here on CPUs, forked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

from kv_transfer.memory import KvPool, cpu_pool
from kv_transfer.sharded_pool import parts_here
from pdserve.node.device_ranks import start as device_start
from pdserve.node.device_ranks.order import DeviceRankOrder
from pdserve.node.device_ranks.process import run_device_rank
from pdserve.node.device_ranks.start import DeviceRanks, start_device_ranks
from pdserve.node.memory.kv_memory import engine_buffer, make_kv_memory
from pdserve.node.rank_hosts import server
from pdserve.node.start import model as start_model
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel, load_runner, plan_model
from pdserve.protocol import NodeRole
from pdserve.settings.config import CheckpointConfig, EngineConfig, NodeConfig, WeightsConfig
from pdserve.settings.rank_host import RankHostConfig
from pdserve.wire.security import OPEN, Security
from tests.forked_rank import ForkedProcess, ForkedRank, begin_forking
from tests.unit.engine_model.harness import Node

BLOCK_SIZE = 16


def forked_rank(order: DeviceRankOrder, fds: Sequence[int]) -> ForkedRank:
    """Start a rank, as pdserve.node.device_ranks.start has it."""
    return ForkedRank(partial(run_device_rank, order), fds)


def fork_device_ranks() -> None:
    """From now on this process, which has no threads yet, forks its ranks."""
    begin_forking()
    device_start._python = forked_rank


class ForkedHost(ForkedProcess):
    """A `pdserve rank` for nodes whose ranks have devices, which it forks."""

    def __init__(self, config: RankHostConfig, prepare: Callable[[], None]) -> None:
        self.address = f"{config.host}:{config.port}"
        super().__init__(partial(_be_host, config, prepare))

    def kill(self) -> None:
        """End it, and wait for that."""
        super().kill()
        self.wait()


def _be_host(config: RankHostConfig, prepare: Callable[[], None]) -> None:
    prepare()
    server.run(config)


def host_config(path: Path, port: int, **settings: object) -> RankHostConfig:
    return RankHostConfig(
        port=port,
        checkpoint=WeightsConfig(model=str(path)),
        engine=EngineConfig(device="cpu", threads=1),
        **settings,
    )


@dataclass
class DeviceRanked:
    """A node as its parts see it."""

    model: NodeModel
    memory: KvPool
    ranks: DeviceRanks | None
    node: Node


def model_of(
    path: Path,
    num_ranks: int,
    block_size: int = BLOCK_SIZE,
    num_stages: int = 1,
    hosts: Sequence[str] = (),
) -> NodeModel:
    """As planned for a GPU, but on CPUs: without native kernels."""
    engine = EngineConfig(
        device="cpu",
        dtype="float32",
        tensor_parallel=num_ranks,
        pipeline_parallel=num_stages,
        block_size=block_size,
        kv_memory="4MiB",
        max_model_len=512,
        rank_hosts=list(hosts),
    )
    config = NodeConfig(engine=engine, checkpoint=CheckpointConfig(model=str(path)))
    with patch.object(start_model, "check_host_stages"):  # which is for CPUs
        planned = plan_model(config)
    return replace(planned, kernels=None)


@contextmanager
def device_ranked(
    path: Path,
    num_ranks: int,
    block_size: int = BLOCK_SIZE,
    num_stages: int = 1,
    hosts: Sequence[str] = (),
    security: Security = OPEN,
) -> Iterator[DeviceRanked]:
    """A node of this process and the other ranks, made as one on GPUs is.

    That of one rank has the native decoder.
    """
    model = model_of(path, num_ranks, block_size, num_stages, hosts)
    memory = make_kv_memory(NodeRole.DECODE, model)
    ranks: DeviceRanks | None = None
    if model.has_device_ranks:
        cores = tuple(sorted(os.sched_getaffinity(0)))
        plan = CorePlan(model.share.num_ranks, cores, cores)  # a thread each
        ranks = start_device_ranks(model, plan, memory, forked_rank, security=security)
    try:
        if ranks is not None:
            ranks.wait_mapped()
        runner = load_runner(model, engine_buffer(memory), lambda _: None, None, ranks)
        for part in parts_here(memory).values():  # what a block held before must never matter
            cpu_pool(part).flat.view(np.float32)[:] = np.nan
        node = Node(runner._model, runner.kv_cache, runner, list(range(model.num_blocks)))
        yield DeviceRanked(model, memory, ranks, node)
    finally:
        if ranks is not None:
            ranks.close()
        memory.close()
