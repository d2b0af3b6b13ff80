"""Starts the other ranks of a node on GPUs, of which this process is rank 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from kv_transfer.cuda.pool import DevicePool
from kv_transfer.memory import ExportedPool, KvPool
from kv_transfer.sharded_pool import parts_of
from pdserve.engine.kv.cache import TORCH_DTYPES
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.ranks.process_group import GroupCollectives, join_ranks
from pdserve.engine.ranks.processes import PythonRank, RankProcess, RankProcesses, wait_ready
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.engine.weights.load import load_torch_weights
from pdserve.errors import NodeSick
from pdserve.node.device_ranks.decoders import LeadingDecoder, make_decoder, open_store
from pdserve.node.device_ranks.order import DeviceRankOrder
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel
from pdserve.protocol import Sickness

log = logging.getLogger(__name__)

_RANK = "pdserve.node.device_ranks.process"
StartRank = Callable[[DeviceRankOrder, Sequence[int]], RankProcess]  # order and inherited files


class DeviceRanks:
    """The other ranks, from their start to their end."""

    def __init__(self, processes: RankProcesses, store_fd: int, pools: Sequence[KvPool]) -> None:
        """Takes the descriptor over."""
        self.processes = processes
        self._store_fd = store_fd
        self._pools = pools
        self._joined: GroupCollectives | None = None

    def wait_mapped(self) -> None:
        """Wait until they have started, and seal their KV pools on CPUs.

        Raises:
            NodeSick: one has not.
        """
        self.processes.wait_mapped()
        for pool in self._pools:
            if isinstance(pool, ExportedPool):
                pool.seal()

    def load(
        self,
        model: NodeModel,
        on_progress: Callable[[float], None],
        cache: PackedCache | None = None,
    ) -> Decoder:
        """Load this rank's share of the weights, and meet the others when they have theirs.

        `cache` is of no use: weights are not packed.

        Raises:
            ModelError: the weights cannot be used.
            NodeSick: a rank has ended.
        """
        shard, device = model.share.shard(0), model.device_of_rank(0)
        steps = StepMemory(self.processes.memory, 0, self.processes.stages)
        dtype = TORCH_DTYPES[model.layout.dtype]
        weights = load_torch_weights(
            model.checkpoint, model.config, dtype, device, on_progress, shard
        )
        steps.group.say_ready()
        wait_ready(steps.group, lambda: on_progress(1.0), self.processes)
        store = open_store(self._store_fd, model.share.num_ranks)
        self._joined = join_ranks(store, shard, device, self._check)
        decoder = make_decoder(
            model.config,
            weights,
            self._joined,
            "" if model.attention == "auto" else model.attention,
            has_graphs=model.has_graphs,
            worst_step=model.worst_step,
        )
        return LeadingDecoder(decoder, steps, has_stages=not shard.is_last_stage)

    def close(self) -> None:
        """End them."""
        if self._joined is not None:
            self._joined.close()
        self.processes.close()
        os.close(self._store_fd)

    def _check(self) -> None:
        if self.processes.lost:
            raise NodeSick(f"{Sickness.RANK_LOST}: {self.processes.lost}")


def start_device_ranks(
    model: NodeModel, cores: CorePlan, memory: KvPool, start: StartRank | None = None
) -> DeviceRanks:
    """Start the other ranks, of which there is at least one.

    They end with the thread that calls this.

    Args:
        model: as planned.
        cores: for all ranks.
        memory: the node's KV, with a part for each rank; or that of no rank, which each allocates.
        start: how; None: in a Python of its own.
    """
    store_fd = os.memfd_create("pdserve-rank-store", os.MFD_CLOEXEC)
    pools = parts_of(memory)

    def start_rank(rank: int, memory_fd: int) -> RankProcess:
        pool = pools[rank] if len(pools) > 1 else None  # private ones have no parts
        order = _order(model, cores, rank, (memory_fd, store_fd), pool)
        fds = [fd for fd in (memory_fd, store_fd, order.pool_fd) if fd >= 0]
        return (start or _python)(order, fds)

    processes = RankProcesses((model.share.num_ranks,), start_rank)
    log.info("ranks 1 and up are processes %s", ", ".join(map(str, processes.pids)))
    return DeviceRanks(processes, store_fd, pools)


def _python(order: DeviceRankOrder, fds: Sequence[int]) -> RankProcess:
    return PythonRank(_RANK, order, fds)


def _order(
    model: NodeModel, cores: CorePlan, rank: int, fds: tuple[int, int], pool: KvPool | None
) -> DeviceRankOrder:
    shard = model.share.shard(rank)
    handle = pool.driver.export(pool.region.address) if isinstance(pool, DevicePool) else b""
    num_ranks = model.share.num_ranks
    own = cores.of_rank(rank, num_ranks)
    return DeviceRankOrder(
        rank=rank,
        num_ranks=num_ranks,
        shard=shard,
        parent=os.getpid(),
        memory_fd=fds[0],
        store_fd=fds[1],
        device=str(model.device_of_rank(rank)),
        pool_fd=pool.fd if isinstance(pool, ExportedPool) else -1,
        pool_handle=handle,
        num_blocks=model.num_blocks,
        layout=model.rank_layouts[rank],
        checkpoint=str(model.checkpoint.path),
        model_id=model.checkpoint.model_id,
        revision=model.checkpoint.revision,
        attention="" if model.attention == "auto" else model.attention,
        has_graphs=model.has_graphs,
        worst_step=model.worst_step,
        num_threads=own.num_threads,
        cores=own.compute,
    )
