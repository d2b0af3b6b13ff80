"""Starts what computes a node's steps with it, if anything does."""

from __future__ import annotations

from typing import TypeAlias

from kv_transfer.memory import KvPool, cpu_pool
from pdserve.node.device_ranks.start import DeviceRanks, start_device_ranks
from pdserve.node.start.cores import CorePlan
from pdserve.node.start.model import NodeModel, packed_cache
from pdserve.node.start.ranks import Ranks, start_ranks
from pdserve.settings.config import NodeConfig
from pdserve.wire.security import Security

OtherRanks: TypeAlias = Ranks | DeviceRanks


def start_other_ranks(
    config: NodeConfig, model: NodeModel, cores: CorePlan, memory: KvPool, security: Security
) -> OtherRanks | None:
    """Start the other ranks of this host; None: there are none.

    They end with the thread that calls this.
    """
    if model.share.is_alone:
        return None
    if model.has_device_ranks:
        return start_device_ranks(model, cores, memory)
    cache = packed_cache(config.engine, config.timeouts)
    return start_ranks(model, cores, cpu_pool(memory), cache, security)
