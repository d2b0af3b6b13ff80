"""Who may have more of a prefix than the pool: the host tier, nodes that hints name, the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.handshake import KvIdentity
from kv_transfer.puller import Pulls
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request
from pdserve.kv import need
from pdserve.node.prefixes.cost import PullCosts
from pdserve.node.prefixes.headroom import Headroom
from pdserve.node.prefixes.host_tier import NodeTier
from pdserve.node.prefixes.store.node_store import NodeStore
from pdserve.node.sessions.client import Sessions
from pdserve.protocol import PrefixSource, Prompt
from pdserve.protocol.requests import state_hashes
from pdserve.settings.prefixes import PrefixPull
from pdserve.shared.clock import Clock


@dataclass(frozen=True, slots=True)
class Prefix:
    """What could be fetched for a prompt, or for a preempted request (prompt and output)."""

    prompt: Prompt  # with the output so far
    hashes: list[bytes]  # of the reusable full blocks, in this node's block size
    num_state: int = 0  # the last ones are of so many blocks of a snapshot, behind the others
    num_saved: int | None = None  # blocks of tokens that all of it saves; None: those fetched

    @classmethod
    def reusable(cls, request: Request, block_size: int) -> Prefix:
        """What this node need not compute of a request, if it has the KV."""
        request.extend_hashes(request.num_tokens, block_size)
        num_blocks = need.full_blocks(request.num_reusable_tokens, block_size)
        prompt = request.prompt.then(request.output_token_ids)
        return cls(prompt, request.block_hashes[:num_blocks])

    def num_offered(self, source: PrefixSource, block_size: int) -> int:
        """How many blocks of this node's size the source could provide, from the first on.

        Of one with a state all, or none: it is not known whether a source has others than its last.
        """
        num_blocks = need.full_blocks(source.num_tokens, block_size)
        if self.num_state:
            return len(self.hashes) if num_blocks == self.num_of_tokens else 0
        return min(num_blocks, len(self.hashes))

    @property
    def num_of_tokens(self) -> int:
        """How many of the blocks are of tokens."""
        return len(self.hashes) - self.num_state

    def least_end(self, num_here: int) -> int:
        """How many blocks are worth more than the first `num_here`: of a state, no part is."""
        return len(self.hashes) if self.num_state else num_here + 1

    def of_tokens(self, first: int, end: int) -> int:
        """How many of the blocks [first, end) are of tokens."""
        return max(0, min(end, self.num_of_tokens) - first)


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

    def goals(
        self, prefix: Prefix, sources: Sequence[PrefixSource], *, is_here: bool = False
    ) -> list[Prefix]:
        """What to fetch of it, the longest first; the next one only if that has failed.

        Without states that is the prefix itself. With them, it is what is up to a snapshot, whose
        blocks are the last. None: nobody has more than the pool. `is_here`: only this host counts.
        """
        if self._pool.snapshots is None:
            return [prefix] if self.num_more(prefix, sources, is_here=is_here) else []
        num_here = len(self._pool.usable(prefix.hashes))
        ends = {need.full_blocks(each.num_tokens, self._pool.block_size) for each in sources}
        goals = [
            goal
            for end in ends
            if num_here < end <= len(prefix.hashes)
            and self._is_whole(goal := self._up_to(prefix, end, num_here), sources, is_here=is_here)
        ]
        last = self._last_below(prefix, num_here, is_here=is_here)
        if last is not None and len(last.hashes) not in {len(goal.hashes) for goal in goals}:
            goals.append(last)
        return sorted(goals, key=lambda goal: len(goal.hashes), reverse=True)

    def num_more(
        self, prefix: Prefix, usable: Sequence[PrefixSource], *, is_here: bool = False
    ) -> int:
        """How many blocks, beyond those in the pool, the best source, tier or store has.

        `is_here`: only what this host has.
        """
        num_here = len(self._pool.match_prefix(prefix.hashes))
        ends = [prefix.num_offered(source, self._pool.block_size) for source in usable]
        ends.append(num_here + self._num_below(prefix.hashes[num_here:], is_here=is_here))
        return max([end - num_here for end in ends] + [0])

    def has_kv_of(self, request: Request) -> bool:
        """Whether KV of a preempted request could be fetched (`shortage.CouldFetch`)."""
        prefix = Prefix.reusable(request, self._pool.block_size)
        return len(self.goals(prefix, self.usable(request.prefix_sources))) > 0

    def _num_below(self, hashes: Sequence[bytes], *, is_here: bool) -> int:
        """How many of these blocks, from the first on, tier and store have."""
        end = 0
        if self._tier is not None:
            end += self._tier.match(hashes)
        if self._store is not None and not is_here:
            end += self._store.num_first(hashes[end:])
        return end

    def _last_below(self, prefix: Prefix, num_here: int, *, is_here: bool) -> Prefix | None:
        """What is up to the last snapshot that tier and store have, with all before it."""
        if self._tier is None:  # so there is no store
            return None
        for end in range(len(prefix.hashes), num_here, -1):
            if self._num_below(state_hashes(prefix.hashes[end - 1], 1), is_here=is_here):
                goal = self._up_to(prefix, end, num_here)
                if self._is_whole(goal, (), is_here=is_here):
                    return goal
        return None

    def _up_to(self, prefix: Prefix, end: int, num_here: int) -> Prefix:
        """What is before the end of so many blocks of tokens, and the snapshot there."""
        num_state = self._pool.state_blocks
        hashes = [*prefix.hashes[:end], *state_hashes(prefix.hashes[end - 1], num_state)]
        return Prefix(prefix.prompt, hashes, num_state, end - num_here)

    def _is_whole(self, goal: Prefix, sources: Sequence[PrefixSource], *, is_here: bool) -> bool:
        """Whether all of it can be had: a part saves nothing."""
        num_missing = len(goal.hashes) - len(self._pool.match_prefix(goal.hashes))
        return 0 < num_missing == self.num_more(goal, sources, is_here=is_here)
