"""What computes a node's steps with it, on this host and on others, if anything does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from kv_transfer.hosts.far_host import FarHost
from kv_transfer.memory import KvPool, cpu_pool
from kv_transfer.sharded_pool import ShardedPool
from pdserve.node.device_hosts.later_hosts import KvSettings, LaterHosts
from pdserve.node.device_ranks.rendezvous import HostAddress
from pdserve.node.device_ranks.start import DeviceRanks, start_device_ranks
from pdserve.node.roles import NodeParts
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel, packed_cache
from pdserve.node.start.ranks import Ranks, start_ranks
from pdserve.settings.config import NodeConfig
from pdserve.wire.security import Security

OtherRanks: TypeAlias = Ranks | DeviceRanks


class NodeRanks:
    """The ranks of a node beside its own process, and what other hosts have of its KV."""

    def __init__(self, ranks: OtherRanks | None, memory: KvPool) -> None:
        """`ranks`: None: there are none. `memory` is the node's KV."""
        self.others = ranks
        self._hosts: LaterHosts | None = ranks.hosts if isinstance(ranks, DeviceRanks) else None
        self._memory = memory

    @property
    def kv_hosts(self) -> Sequence[FarHost]:
        """Those that have parts of the KV."""
        return [] if self._hosts is None else self._hosts.kv

    def lost(self) -> str:
        """Which rank or host has ended, and how; empty: none has."""
        return "" if self.others is None else self.others.lost

    async def wait_mapped(self) -> None:
        """Wait until those of this host have started. Raises NodeSick: one has not."""
        if self.others is not None:
            await asyncio.to_thread(self.others.wait_mapped)

    async def share_kv(self, parts: NodeParts) -> None:
        """Have hosts do what is to be done with their parts of the KV, once all have loaded.

        Raises:
            NodeSick, PdserveError: as LaterHosts.share_kv.
        """
        if self._hosts is None or not isinstance(self._memory, ShardedPool):
            return
        config, tier = parts.config, parts.tier
        settings = KvSettings(
            config.transports,
            config.kv_port,
            config.handoff.links,
            0 if tier is None else tier.tier.num_blocks,
        )
        await self._hosts.share_kv(parts.exporter, self._memory, settings, parts.clock)

    async def close(self) -> None:
        """End those of this host, and leave the others. Nothing computes, and no KV moves."""
        if self._hosts is not None:
            await self._hosts.leave_kv()
        if self.others is not None:
            await asyncio.to_thread(self.others.close)


def start_other_ranks(
    config: NodeConfig, model: NodeModel, cores: CorePlan, memory: KvPool, security: Security
) -> NodeRanks:
    """Start the other ranks of this host, if there are any.

    They end with the thread that calls this.
    """
    return NodeRanks(_started(config, model, cores, memory, security), memory)


def _started(
    config: NodeConfig, model: NodeModel, cores: CorePlan, memory: KvPool, security: Security
) -> OtherRanks | None:
    if model.share.is_alone:
        return None
    if model.has_device_ranks:
        at = HostAddress(config.host, config.advertise or config.host)
        return start_device_ranks(model, cores, memory, at=at, security=security)
    cache = packed_cache(config.engine)
    return start_ranks(model, cores, cpu_pool(memory), cache, security)
