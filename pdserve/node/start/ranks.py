"""Starts the ranks of a node's host, of which this process is rank 0."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable

from kv_transfer.memory import ExportedPool
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.ranks.adapters import OtherRanks
from pdserve.engine.ranks.order import RankOrder
from pdserve.engine.ranks.processes import PythonRank, RankProcess, RankProcesses, wait_ready
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.engine.weights.load import load_rank
from pdserve.node.rank_hosts.messages import SECRET_BYTES, CarrierOrder, HostOrder
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel
from pdserve.protocol.version import PROTOCOL
from pdserve.wire.security import OPEN, Security

log = logging.getLogger(__name__)

_RANK, _CARRIER = "pdserve.engine.ranks.process", "pdserve.node.rank_hosts.carrier"


class Ranks:
    """The other ranks of this host."""

    def __init__(self, processes: RankProcesses, pool: ExportedPool, adapters: OtherRanks) -> None:
        self.processes = processes
        self.adapters = adapters
        self._pool = pool

    @property
    def lost(self) -> str:
        """As RankProcesses.lost."""
        return self.processes.lost

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
            model.plan(model.share.shard(0)),
            model.activations,
            steps,
            on_progress,
            cache=cache,
            kernels=_variant(model),
        )
        if model.layout.rounded_to is not None:
            decoder.round_kv(model.layout.rounded_to)
        decoder.others = self.adapters
        steps.group.say_ready()
        wait_ready(steps.group, lambda: on_progress(1.0), self.processes)
        return decoder

    def close(self) -> None:
        """End them."""
        self.processes.close()
        self.adapters.close()


def start_ranks(
    model: NodeModel,
    cores: CorePlan,
    pool: ExportedPool,
    cache: PackedCache | None,
    security: Security = OPEN,
) -> Ranks:
    """Start the other ranks, of which there is at least one.

    They end with the thread that calls this.

    Args:
        model: as planned, for this host.
        cores: of this host, for all ranks.
        pool: its KV, not sealed yet.
        cache: of packed weights.
        security: of the connection to the next host.
    """
    share, adapters = model.share, OtherRanks()

    def start(rank: int, memory_fd: int) -> RankProcess:
        with adapters.connect() as end:
            fds = (memory_fd, pool.fd, end.fileno())
            if share.later_hosts and rank == sum(share.stages) - 1:
                return PythonRank(_CARRIER, _carrier_order(model, rank, fds, security), fds)
            return PythonRank(_RANK, _rank_order(model, rank, fds, cores, cache), fds)

    processes = RankProcesses(share.stages, start)
    log.info("ranks 1 and up are processes %s", ", ".join(map(str, processes.pids)))
    return Ranks(processes, pool, adapters)


def _rank_order(
    model: NodeModel,
    rank: int,
    fds: tuple[int, ...],
    cores: CorePlan,
    cache: PackedCache | None,
) -> RankOrder:
    own = cores.of_rank(rank - model.share.first_rank, model.share.num_ranks)
    return RankOrder(
        rank=rank,
        stages=model.share.stages,
        shard=model.share.shard(rank),
        parent=os.getpid(),
        memory_fd=fds[0],
        pool_fd=fds[1],
        adapters_fd=fds[2],
        num_blocks=model.num_blocks,
        layout=model.layout,
        first_pool_layer=model.first_layer,
        checkpoint=str(model.checkpoint.path),
        model_id=model.checkpoint.model_id,
        revision=model.checkpoint.revision,
        form=model.form,
        activations=model.activations,
        kernels=_variant(model),
        packed_folder=None if cache is None else str(cache.folder),
        packed_limit=0 if cache is None else cache.limit_bytes,
        num_threads=own.num_threads,
        cores=own.compute,
    )


def _carrier_order(
    model: NodeModel, rank: int, fds: tuple[int, ...], security: Security
) -> CarrierOrder:
    later = model.share.next()
    first_layer = later.first_layer(model.config)
    return CarrierOrder(
        rank=rank,
        stages=model.share.stages,
        parent=os.getpid(),
        memory_fd=fds[0],
        pool_fd=fds[1],
        adapters_fd=fds[2],
        num_blocks=model.num_blocks,
        layout=model.layout,
        first_layer=first_layer - model.first_layer,
        first_layer_of_model=first_layer,
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        tls_dir="" if security.tls_dir is None else str(security.tls_dir),
        to_next=HostOrder(
            protocol=PROTOCOL,
            token=security.token,
            model_id=model.checkpoint.model_id,
            revision=model.checkpoint.revision,
            part=later,
            layout=model.config.kv_layout(
                model.layout.block_size, model.layout.dtype, model.layout.rounded_to
            ),
            num_blocks=model.num_blocks,
            quantization=model.form.quantization,
            activations=model.activations.value,
            kernels="" if model.kernels is None else model.kernels.digest,
            secret=secrets.token_bytes(SECRET_BYTES),
        ),
        address=model.share.later_hosts[0],
    )


def _variant(model: NodeModel) -> str:
    return "" if model.kernels is None else model.kernels.variant
