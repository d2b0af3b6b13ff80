"""Starts the ranks of a host with devices; rank 0 of the node is the node itself."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from kv_transfer.cuda.pool import DevicePool
from kv_transfer.memory import ExportedPool, KvPool
from kv_transfer.sharded_pool import parts_of
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.ranks.adapters import OtherRanks
from pdserve.engine.ranks.process_group import GroupCollectives
from pdserve.engine.ranks.processes import PythonRank, RankProcess, RankProcesses, wait_ready
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.engine.weights.load import load_device_weights
from pdserve.node.device_hosts.later_hosts import LaterHosts
from pdserve.node.device_ranks.decoders import LeadingDecoder, make_decoder
from pdserve.node.device_ranks.order import DeviceRankOrder, Rendezvous
from pdserve.node.device_ranks.rendezvous import HERE, HostAddress, StoreServer, meet
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel
from pdserve.protocol import Sickness
from pdserve.shared.errors import NodeSick
from pdserve.wire.security import OPEN, Security

log = logging.getLogger(__name__)

_RANK = "pdserve.node.device_ranks.process"
StartRank = Callable[[DeviceRankOrder, Sequence[int]], RankProcess]  # order and inherited files


class StartedRanks:
    """The ranks of this host that are processes of their own, from their start to their end."""

    def __init__(
        self, processes: RankProcesses, pools: Sequence[KvPool], adapters: OtherRanks
    ) -> None:
        self.processes = processes
        self.adapters = adapters
        self._pools = pools

    def wait_mapped(self) -> None:
        """Wait until they have started, and seal their KV pools on CPUs.

        Raises:
            NodeSick: one has not.
        """
        self.processes.wait_mapped()
        for pool in self._pools:
            if isinstance(pool, ExportedPool):
                pool.seal()

    def close(self) -> None:
        """End them."""
        self.processes.close()
        self.adapters.close()


class DeviceRanks:
    """The other ranks of a node, as its rank 0 sees them."""

    def __init__(
        self,
        started: StartedRanks,
        rendezvous: Rendezvous,
        server: StoreServer | None,
        hosts: LaterHosts | None,
    ) -> None:
        """Takes the rendezvous' descriptor over; without other hosts, the last two are None."""
        self._started = started
        self._rendezvous = rendezvous
        self._server = server
        self.hosts = hosts
        self._joined: GroupCollectives | None = None

    @property
    def processes(self) -> RankProcesses:
        """Those of this host."""
        return self._started.processes

    @property
    def lost(self) -> str:
        """Which rank or host has ended, and how; empty: none has."""
        return self.processes.lost or (self.hosts.lost if self.hosts is not None else "")

    def wait_mapped(self) -> None:
        """As StartedRanks.wait_mapped."""
        self._started.wait_mapped()

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
            NodeSick: a rank or a host has ended, or does not come.
        """
        num_ranks = model.share.parallelism.num_ranks
        store = None if self._server is None else self._server.open(num_ranks)
        if self.hosts is not None:
            self.hosts.begin(lambda: on_progress(0.0))
        shard, device = model.share.shard(0), model.device_of_rank(0)
        steps = StepMemory(self.processes.memory, 0, self.processes.stages)
        weights = load_device_weights(
            model.checkpoint, model.plan(shard), model.activations, device, on_progress
        )
        steps.group.say_ready()
        wait_ready(steps.group, lambda: on_progress(1.0), self.processes)

        def check() -> None:
            on_progress(1.0)
            if lost := self.lost:
                raise NodeSick(f"{Sickness.RANK_LOST}: {lost}")

        self._joined = meet(self._rendezvous, shard, device, check, store)
        decoder = make_decoder(
            model.config,
            weights,
            self._joined,
            "" if model.attention == "auto" else model.attention,
            has_graphs=model.has_graphs,
            worst_step=model.worst_step,
            tap_layers=model.tap_layers,
            kv_codes=model.layout.dtype.is_coded,
        )
        has_stages = not shard.is_last_stage
        return LeadingDecoder(
            decoder, steps, self._started.adapters, self.hosts, has_stages=has_stages
        )

    def close(self) -> None:
        """End them."""
        if self._joined is not None:
            self._joined.close()
        self._started.close()
        if self.hosts is not None:
            self.hosts.close()
        if self._server is not None:
            self._server.close()
        if self._rendezvous.store_fd >= 0:
            os.close(self._rendezvous.store_fd)


def start_device_ranks(
    model: NodeModel,
    cores: CorePlan,
    memory: KvPool,
    start: StartRank | None = None,
    at: HostAddress = HERE,
    security: Security = OPEN,
) -> DeviceRanks:
    """Start the other ranks of the node, of which there is at least one.

    Those of this host end with the thread that calls this; later hosts are told when they load.

    Args:
        model: as planned.
        cores: of this host, for all its ranks.
        memory: the node's KV, with a part for each rank; or that of no rank, which each allocates.
        start: how; None: in a Python of its own.
        at: where later hosts reach this one.
        security: of the connections to them.

    Raises:
        ConfigError: they cannot be listened for.
    """
    num_ranks = model.share.parallelism.num_ranks
    if model.share.has_all:
        fd = os.memfd_create("pdserve-rank-store", os.MFD_CLOEXEC)
        rendezvous = Rendezvous(num_ranks=num_ranks, store_fd=fd)
        return DeviceRanks(
            start_host_ranks(model, cores, memory, rendezvous, start), rendezvous, None, None
        )
    server = StoreServer(at)
    rendezvous = Rendezvous(num_ranks=num_ranks, store=server.address, own_host=at.reached)
    started = start_host_ranks(model, cores, memory, rendezvous, start)
    hosts = LaterHosts(model, server.address, security, shares_kv=memory.kind != "private")
    return DeviceRanks(started, rendezvous, server, hosts)


def start_host_ranks(
    model: NodeModel,
    cores: CorePlan,
    memory: KvPool,
    rendezvous: Rendezvous,
    start: StartRank | None = None,
) -> StartedRanks:
    """Start the ranks of this host, all but rank 0 of the node. Args: as start_device_ranks."""
    share, pools, adapters = model.share, parts_of(memory), OtherRanks()

    def start_rank(rank: int, memory_fd: int) -> RankProcess:
        number = share.ranks[rank - share.first_rank]
        pool = pools[number] if len(pools) > 1 else None  # private ones have no parts
        with adapters.connect() as end:
            order = _order(model, cores, rank, (memory_fd, end.fileno()), rendezvous, pool)
            every = (memory_fd, order.adapters_fd, rendezvous.store_fd, order.pool_fd)
            return (start or _python)(order, [fd for fd in every if fd >= 0])

    processes = RankProcesses((share.first_rank + share.num_ranks,), start_rank)
    log.info("processes of ranks: %s", ", ".join(map(str, processes.pids)) or "none but this one")
    return StartedRanks(processes, pools, adapters)


def _python(order: DeviceRankOrder, fds: Sequence[int]) -> RankProcess:
    return PythonRank(_RANK, order, fds)


def _order(
    model: NodeModel,
    cores: CorePlan,
    rank: int,
    fds: tuple[int, int],
    rendezvous: Rendezvous,
    pool: KvPool | None,
) -> DeviceRankOrder:
    share = model.share
    index = rank - share.first_rank
    handle = pool.driver.export(pool.region.address) if isinstance(pool, DevicePool) else b""
    own = cores.of_rank(index, share.num_ranks)
    return DeviceRankOrder(
        rank=rank,
        num_processes=share.first_rank + share.num_ranks,
        shard=share.shard(rank),
        parent=os.getpid(),
        memory_fd=fds[0],
        adapters_fd=fds[1],
        rendezvous=rendezvous,
        device=str(model.device_of_rank(index)),
        pool_fd=pool.fd if isinstance(pool, ExportedPool) else -1,
        pool_handle=handle,
        num_blocks=model.num_blocks,
        layout=model.rank_layouts[share.ranks[index]],
        form=model.form,
        activations=model.activations,
        checkpoint=str(model.checkpoint.path),
        model_id=model.checkpoint.model_id,
        revision=model.checkpoint.revision,
        attention="" if model.attention == "auto" else model.attention,
        has_graphs=model.has_graphs,
        worst_step=model.worst_step,
        tap_layers=model.tap_layers if share.parallelism.pipeline > 1 else (),
        num_threads=own.num_threads,
        cores=own.compute,
    )
