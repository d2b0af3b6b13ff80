"""The data that the prefix fetcher works on, and the parts of the node that it uses."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.handshake import KvIdentity
from kv_transfer.puller import Pulls
from pdserve.clock import Clock
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request
from pdserve.kv import need
from pdserve.node.prefixes.cost import PullCosts
from pdserve.node.prefixes.headroom import Headroom
from pdserve.node.prefixes.host_tier import NodeTier
from pdserve.node.sessions.client import Sessions
from pdserve.protocol import PrefixSource, Prompt


@dataclass(frozen=True, slots=True)
class Prefix:
    """What could be fetched for a prompt, or for a preempted request (prompt and output)."""

    prompt: Prompt  # with the output so far
    hashes: list[bytes]  # of the reusable full blocks, in this node's block size

    @classmethod
    def reusable(cls, request: Request, block_size: int) -> Prefix:
        """What this node need not compute of a request, if it has the KV."""
        request.extend_hashes(request.num_tokens, block_size)
        num_blocks = need.full_blocks(request.num_reusable_tokens, block_size)
        prompt = request.prompt.then(request.output_token_ids)
        return cls(prompt, request.block_hashes[:num_blocks])

    def num_offered(self, source: PrefixSource, block_size: int) -> int:
        """How many blocks of this node's size the source could provide, from the first on."""
        return min(need.full_blocks(source.num_tokens, block_size), len(self.hashes))


@dataclass(slots=True)
class Fetched:
    """The result of one fetch, in tokens."""

    from_tier: int = 0
    from_nodes: int = 0


@dataclass(frozen=True, slots=True)
class FetchParts:
    """The parts of the node that a fetcher uses."""

    pool: BlockPool
    identity: KvIdentity
    puller: Pulls
    sessions: Sessions
    tier: NodeTier | None
    pull_costs: PullCosts
    clock: Clock
    headroom: Headroom
