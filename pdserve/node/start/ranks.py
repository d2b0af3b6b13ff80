"""Starts the ranks of a node, of which it is itself rank 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from kv_transfer.memory import ExportedPool, KvPool
from pdserve.engine.kv.cache import TORCH_DTYPES
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.ranks.order import RankOrder
from pdserve.engine.ranks.processes import RankProcesses, wait_ready
from pdserve.engine.ranks.shard import Shard
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.engine.weights.load import load_rank
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel

log = logging.getLogger(__name__)


class Ranks:
    """The other ranks of this node."""

    def __init__(self, processes: RankProcesses, pool: ExportedPool) -> None:
        self.processes = processes
        self._pool = pool

    def wait_mapped(self) -> None:
        """Wait until they have mapped the KV pool, and seal it: other nodes may have it then.

        Raises:
            NodeSick: one has not.
        """
        self.processes.wait_mapped()
        self._pool.seal()

    def load(
        self,
        model: NodeModel,
        on_progress: Callable[[float], None],
        cache: PackedCache | None,
    ) -> Decoder:
        """Load this rank's share of the weights, and wait for the others to load theirs.

        Raises:
            ModelError: the weights cannot be used.
            NodeSick: a rank has ended.
        """
        steps = StepMemory(self.processes.memory, 0, self.processes.stages)
        decoder = load_rank(
            model.checkpoint,
            model.config,
            TORCH_DTYPES[model.layout.dtype],
            steps,
            Shard.of_rank(0, model.parallelism),
            on_progress,
            is_int8=model.quantization == "int8",
            cache=cache,
            kernels="" if model.kernels is None else model.kernels.variant,
        )
        steps.group.say_ready()
        wait_ready(steps.group, lambda: on_progress(1.0), self.processes)
        return decoder

    def close(self) -> None:
        """End them."""
        self.processes.close()


def start_ranks(
    model: NodeModel, cores: CorePlan, memory: KvPool, cache: PackedCache | None
) -> Ranks | None:
    """Start the other ranks; None: there are none.

    They end with the thread that calls this.

    Args:
        model: as planned.
        cores: of the node, for all ranks.
        memory: its pool, not sealed yet.
        cache: of packed weights.
    """
    num_ranks = model.parallelism.num_ranks
    if num_ranks == 1:
        return None
    assert isinstance(memory, ExportedPool), "ranks are for CPUs"

    def order(rank: int, memory_fd: int) -> RankOrder:
        own = cores.of_rank(rank, num_ranks)
        return RankOrder(
            rank=rank,
            stages=model.parallelism.stages,
            shard=Shard.of_rank(rank, model.parallelism),
            parent=os.getpid(),
            memory_fd=memory_fd,
            pool_fd=memory.fd,
            num_blocks=model.num_blocks,
            layout=model.layout,
            first_pool_layer=0,
            checkpoint=str(model.checkpoint.path),
            model_id=model.checkpoint.model_id,
            revision=model.checkpoint.revision,
            is_int8=model.quantization == "int8",
            kernels="" if model.kernels is None else model.kernels.variant,
            packed_folder=None if cache is None else str(cache.folder),
            packed_limit=0 if cache is None else cache.limit_bytes,
            packing_s=0.0 if cache is None else cache.wait_s,
            num_threads=own.num_threads,
            cores=own.compute,
        )

    processes = RankProcesses(model.parallelism.stages, order)
    log.info("ranks 1 and up are processes %s", ", ".join(map(str, processes.pids)))
    return Ranks(processes, memory)
