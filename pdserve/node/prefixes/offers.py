"""Who may have more of a prefix than the pool: the host tier, and the nodes that hints name."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request
from pdserve.node.prefixes.host_tier import NodeTier
from pdserve.node.prefixes.parts import Prefix
from pdserve.node.sessions.client import Sessions
from pdserve.protocol import PrefixSource
from pdserve.settings.config import PrefixPull


class PrefixOffers:
    """Looks without fetching. With `pull` "never", no node is asked."""

    def __init__(
        self, pool: BlockPool, sessions: Sessions, tier: NodeTier | None, pull: PrefixPull
    ) -> None:
        self.pull = pull
        self._pool = pool
        self._sessions = sessions
        self._tier = tier

    def usable(self, sources: Sequence[PrefixSource]) -> Sequence[PrefixSource]:
        """The sources that may be asked: all but those that could not be reached recently."""
        if self.pull == "never":
            return ()
        return [s for s in sources if not self._sessions.has_failed(s.node)]

    def num_more(self, prefix: Prefix, usable: Sequence[PrefixSource]) -> int:
        """How many blocks, beyond those in the pool, the best source or the tier has."""
        num_here = len(self._pool.match_prefix(prefix.hashes))
        ends = [prefix.num_offered(source, self._pool.block_size) for source in usable]
        if self._tier is not None:
            ends.append(num_here + self._tier.match(prefix.hashes[num_here:]))
        return max([end - num_here for end in ends] + [0])

    def has_kv_of(self, request: Request) -> bool:
        """Whether KV of a preempted request could be fetched (`preemption.CouldFetch`)."""
        prefix = Prefix.reusable(request, self._pool.block_size)
        return self.num_more(prefix, self.usable(request.prefix_sources)) > 0
