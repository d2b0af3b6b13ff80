"""Nodes of several ranks, forked from this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kv_transfer.memory import ExportedPool
from pdserve import _native
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.config import load_model_config
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.plan.forms import FORMS, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.adapters import OtherRanks
from pdserve.engine.ranks.hosts import HostShare
from pdserve.engine.ranks.order import RankOrder
from pdserve.engine.ranks.process import run_rank
from pdserve.engine.ranks.processes import RankProcesses, wait_ready
from pdserve.engine.ranks.shard import check_ranks
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.engine.weights.load import load_rank
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.forked_rank import ForkedRank
from tests.unit.engine_model.harness import Node

BLOCK_SIZE = 16
NUM_BLOCKS = 600


@contextmanager
def ranked_node(
    path: Path,
    parallelism: Parallelism,
    dtype: KvDtype = KvDtype.FLOAT32,
    cache: PackedCache | None = None,
) -> Iterator[tuple[Node, RankProcesses]]:
    """A node of this process and the other ranks."""
    checkpoint = resolve_checkpoint(str(path))
    config = load_model_config(checkpoint)
    check_ranks(config, parallelism)
    share = HostShare(parallelism)
    layout = config.kv_layout(BLOCK_SIZE, dtype)
    pool = ExportedPool(NUM_BLOCKS, layout.block_bytes, is_sealed=False)

    adapters = OtherRanks()

    def order(rank: int, memory_fd: int, adapters_fd: int) -> RankOrder:
        return RankOrder(
            rank=rank,
            stages=share.stages,
            shard=share.shard(rank),
            parent=os.getpid(),
            memory_fd=memory_fd,
            pool_fd=pool.fd,
            adapters_fd=adapters_fd,
            num_blocks=NUM_BLOCKS,
            layout=layout,
            first_pool_layer=0,
            checkpoint=str(checkpoint.path),
            model_id=checkpoint.model_id,
            revision=checkpoint.revision,
            form=FORMS[dtype],
            activations=ActivationDtype(dtype),
            kernels="",
            packed_folder=None if cache is None else str(cache.folder),
            packed_limit=1 << 40,
            num_threads=1,
            cores=(),
        )

    def start(rank: int, memory_fd: int) -> ForkedRank:
        with adapters.connect() as end:
            fds = [memory_fd, pool.fd, end.fileno()]
            return ForkedRank(partial(run_rank, order(rank, memory_fd, fds[2])), fds)

    ranks = RankProcesses(share.stages, start)
    num_threads = _native.num_threads()
    try:
        ranks.wait_mapped()
        pool.seal()
        _native.set_num_threads(1)
        steps = StepMemory(ranks.memory, 0, share.stages)
        plan = ModelPlan.of(config, share.shard(0), FORMS[dtype])
        model = load_rank(
            checkpoint, plan, ActivationDtype(dtype), steps, lambda _: None, cache=cache
        )
        model.others = adapters
        steps.group.say_ready()
        wait_ready(steps.group, lambda: None, ranks)
        pool.flat.view(np.float32)[:] = np.nan  # what a block held before must never matter
        kv_cache = KvCache(layout, NUM_BLOCKS, torch.device("cpu"), pool.flat)
        yield Node(model, kv_cache, ModelRunner(model, kv_cache), list(range(NUM_BLOCKS))), ranks
    finally:
        ranks.close()
        adapters.close()
        pool.close()
        _native.set_num_threads(num_threads)
