"""A later host of a node whose ranks have a device each: it starts them, and leads them."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial

from kv_transfer.cuda.pool import PrivatePool
from kv_transfer.hosts.agent import Agent
from kv_transfer.memory import KvPool
from kv_transfer.sharded_pool import ShardedPool
from kv_transfer.tier import TierCopies
from kv_transfer.transports.tls import NodeTls
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.node.device_hosts.agent_thread import AgentThread
from pdserve.node.device_hosts.stand_in import DeviceStandIn
from pdserve.node.device_ranks.order import Rendezvous
from pdserve.node.device_ranks.start import start_host_ranks
from pdserve.node.memory.kv_memory import parts_memory
from pdserve.node.prefixes.host_tier import slot_copies, slots_of
from pdserve.node.rank_hosts.door import ServedNode
from pdserve.node.rank_hosts.messages import DevicesOrder
from pdserve.node.rank_hosts.ordered_model import device_model_of
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel, named_device
from pdserve.settings.rank_host import RankHostConfig
from pdserve.shared.errors import ConfigError, TransportUnavailable

log = logging.getLogger(__name__)


def serve_devices(
    config: RankHostConfig,
    cores: CorePlan,
    node: ServedNode,
    devices: DevicesOrder,
    checkpoint: Checkpoint,
    tls: NodeTls | None,
) -> None:
    """Load what the node asks for, and compute its steps until it ends.

    Args:
        config: of this host.
        cores: of this host, for all its ranks.
        node: which is served.
        devices: the part of its order about them.
        checkpoint: the one that is here.
        tls: how connections are secured.

    Raises:
        PeerLost: it has ended.
        NodeSick, RanksLost: a rank of this host has, or its agent.
        ConfigError: this host cannot do what is asked.
    """
    model = device_model_of(node.order, devices, checkpoint, named_device(config.engine.device))
    share = model.share
    log.info("ranks %d to %d: %s", share.ranks[0], share.ranks[-1], cores.describe())
    rendezvous = Rendezvous(
        num_ranks=share.parallelism.num_ranks, store=devices.store, own_host=node.stream.own_host
    )
    with ExitStack() as closing:
        memory = _memory(model, devices)
        closing.callback(memory.close)
        started = start_host_ranks(model, cores, memory, rendezvous)
        closing.callback(started.close)
        started.wait_mapped()
        last_stage = (share.parallelism.pipeline - 1) * share.parallelism.tensor
        thread: AgentThread | None = None
        if isinstance(memory, ShardedPool):
            make_tier = partial(_tier, model, memory)
            agent = Agent(memory, config.host, devices.advertised, make_tier, tls)
            thread = AgentThread(agent, node.second)
            closing.callback(thread.close)
        stand_in = DeviceStandIn(
            node.stream,
            started.processes,
            model.config.hidden_size,
            model.config.vocab_size,
            thread,
        )
        stand_in.run(has_states=last_stage in share.ranks)


def _memory(model: NodeModel, devices: DevicesOrder) -> KvPool:
    """The KV of the ranks here. Raises ConfigError: there is no room, or it cannot be shared."""
    if not devices.secret:
        return PrivatePool(model.num_blocks, model.layout.block_bytes)
    try:
        return parts_memory(model)
    except TransportUnavailable as error:
        raise ConfigError(f"this host cannot share its KV, as the node does: {error}") from error


def _tier(model: NodeModel, memory: KvPool, num_blocks: int) -> list[TierCopies]:
    return slot_copies(slots_of(model, num_blocks), memory)
