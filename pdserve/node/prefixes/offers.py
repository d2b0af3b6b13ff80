"""Who may have more of a prefix than the pool: the host tier, nodes that hints name, the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.handshake import KvIdentity
from kv_transfer.puller import Pulls
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.kv.snapshots import state_hashes
from pdserve.engine.request import Request
from pdserve.kv import need
from pdserve.node.prefixes.cost import PullCosts
from pdserve.node.prefixes.headroom import Headroom
from pdserve.node.prefixes.host_tier import NodeTier
from pdserve.node.prefixes.store.node_store import NodeStore
from pdserve.node.sessions.client import Sessions
from pdserve.protocol import PrefixSource, Prompt
from pdserve.settings.prefixes import PrefixPull
from pdserve.shared.clock import Clock


@dataclass(frozen=True, slots=True)
class Prefix:
    """What could be fetched for a prompt, or for a preempted request (prompt and output)."""

    prompt: Prompt  # with the output so far
    hashes: list[bytes]  # of the reusable full blocks, in this node's block size
    num_state: int = 0  # the last ones are of so many blocks of a snapshot, behind the others
    num_saved: int | None = None  # blocks of tokens that the fetched save; None: themselves

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
    from_store: int = 0


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
    store: NodeStore | None = None


class PrefixOffers:
    """Looks without fetching. With `pull` "never", no node is asked."""

    def __init__(
        self,
        pool: BlockPool,
        sessions: Sessions,
        tier: NodeTier | None,
        pull: PrefixPull,
        store: NodeStore | None = None,
    ) -> None:
        self.pull = pull
        self._store = store
        self._pool = pool
        self._sessions = sessions
        self._tier = tier

    def usable(self, sources: Sequence[PrefixSource]) -> Sequence[PrefixSource]:
        """The sources that may be asked: all but those that could not be reached recently."""
        if self.pull == "never":
            return ()
        return [s for s in sources if not self._sessions.has_failed(s.node)]

    def num_more(
        self, prefix: Prefix, usable: Sequence[PrefixSource], *, is_here: bool = False
    ) -> int:
        """How many blocks, beyond those in the pool, the best source, tier or store has.

        `is_here`: only what this host has.
        """
        num_here = len(self._pool.match_prefix(prefix.hashes))
        ends = [prefix.num_offered(source, self._pool.block_size) for source in usable]
        end = num_here
        if self._tier is not None:
            end += self._tier.match(prefix.hashes[end:])
        if self._store is not None and not is_here:
            end += self._store.num_first(prefix.hashes[end:])
        ends.append(end)
        return max([end - num_here for end in ends] + [0])

    def reachable(self, prefix: Prefix) -> Prefix:
        """The same; with states: up to the last snapshot in the tier, whose blocks are the last.

        Nothing, if one in the pool is behind that.
        """
        snapshots, tier = self._pool.snapshots, self._tier
        if snapshots is None:
            return prefix
        hashes = prefix.hashes
        num_here = len(self._pool.usable(hashes))
        for number in range(len(hashes), num_here if tier is not None else len(hashes), -1):
            of_state = state_hashes(hashes[number - 1], 1)
            if tier is not None and tier.match(of_state):
                of_state = snapshots.hashes_of(hashes[number - 1])
                if tier.match(of_state) == len(of_state):
                    wanted = [*hashes[:number], *of_state]
                    return Prefix(prefix.prompt, wanted, len(of_state), number - num_here)
        return Prefix(prefix.prompt, [])

    def has_kv_of(self, request: Request) -> bool:
        """Whether KV of a preempted request could be fetched (`shortage.CouldFetch`)."""
        prefix = self.reachable(Prefix.reusable(request, self._pool.block_size))
        return self.num_more(prefix, self.usable(request.prefix_sources)) > 0
