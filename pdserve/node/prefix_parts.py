"""What is fetched, and what it is fetched with."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.handshake import KvIdentity
from kv_transfer.puller import Puller
from pdserve.clock import Clock
from pdserve.engine.block_pool import BlockPool
from pdserve.node.cost import Costs
from pdserve.node.headroom import Headroom
from pdserve.node.host_tier import NodeTier
from pdserve.node.session_client import Sessions
from pdserve.protocol import PrefixSource


@dataclass(frozen=True, slots=True)
class Prefix:
    """What could be fetched of a prompt, or of a preempted request's prompt and answer."""

    token_ids: list[int]
    cache_salt: str
    hashes: list[bytes]  # of the blocks that can be reused, in this node's block size

    def num_offered(self, source: PrefixSource, block_size: int) -> int:
        """Blocks of this node's size that the source's tokens fill."""
        return min(source.num_tokens // block_size, len(self.hashes))


@dataclass(frozen=True, slots=True)
class FetchParts:
    """What a fetcher works with."""

    pool: BlockPool
    identity: KvIdentity
    puller: Puller
    sessions: Sessions
    tier: NodeTier | None
    costs: Costs
    clock: Clock
    headroom: Headroom
