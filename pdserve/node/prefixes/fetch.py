"""Fetches the KV of a prompt's prefix before the prompt is computed, where that is faster.

    blocks in the pool ──► in the host tier ──► at the first source ... ──► in the prefix store

Fetched blocks are published like computed ones, so the request that they were fetched for, and any
other one, finds them as an ordinary prefix hit. The hints may be wrong; then the prompt is computed
as it would be without them. A failed fetch never fails a request. A fetch takes at most
`timeout_s`, or longer where pulls have taken longer, but no longer than it is worth, nor than
sources keep what they have offered. The sources share this time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.node.prefixes.cost import PrefixWorth
from pdserve.node.prefixes.headroom import Filling
from pdserve.node.prefixes.host_tier import NodeTier
from pdserve.node.prefixes.offers import Fetched, FetchParts, Prefix, PrefixOffers
from pdserve.node.prefixes.pull import SourcePuller
from pdserve.node.prefixes.store.node_store import NodeStore
from pdserve.protocol import PrefixSource
from pdserve.shared.errors import OutOfBlocks, PdserveError

log = logging.getLogger(__name__)

TIER = "tier"  # its name among the transports in `PullCosts`


@dataclass(slots=True)
class PrefixFetchStatistics:
    """Counters."""

    tokens: int = 0  # fetched from other nodes
    tier_tokens: int = 0  # loaded from the host tier
    store_tokens: int = 0  # read from the prefix store
    bytes: int = 0  # fetched from other nodes
    declined: int = 0  # faster to compute
    crowded: int = 0  # no room for the blocks
    failed: int = 0  # sources that had nothing, refused, were lost, or took too long
    replanned: int = 0  # sources tried after another one had failed
    timed_out: int = 0


@dataclass(slots=True)
class _Attempt:
    """A fetch in progress, for which other requests may wait."""

    over: asyncio.Event = field(default_factory=asyncio.Event)
    was_complete: bool = False  # it tried every source, so another attempt would be useless


class PrefixFetcher:
    """Fetches prefixes into one pool. Belongs to the event loop."""

    def __init__(
        self, parts: FetchParts, offers: PrefixOffers, timeout_s: float, longest_s: float
    ) -> None:
        """`longest_s`: for which sources keep what they have offered."""
        self.statistics = PrefixFetchStatistics()
        self._parts = parts
        self._pool = parts.pool
        self._headroom = parts.headroom
        self._layout = parts.identity.layout
        self._offers = offers
        self._timeout_s = timeout_s
        self._filling = Filling(parts.pool, parts.headroom)
        self._worth = PrefixWorth(
            parts.pull_costs, self._layout, parts.clock, offers.pull, longest_s
        )
        self._sources = SourcePuller(parts, self._filling, self._worth, timeout_s)
        self._fetching: dict[bytes, _Attempt] = {}  # by the hash of the first missing block

    def could_fetch(
        self, prefix: Prefix, sources: Sequence[PrefixSource], *, is_here: bool = False
    ) -> bool:
        """Whether anything could be fetched for this prefix; `is_here`: within this host."""
        return len(self._offers.goals(prefix, self._offers.usable(sources), is_here=is_here)) > 0

    async def fetch(
        self, prefix: Prefix, sources: Sequence[PrefixSource], *, is_here: bool = False
    ) -> Fetched:
        """Fetch as much of the prefix as is worth it. Raises nothing except when cancelled.

        Afterwards, also when cancelled, the fetched blocks are cached, and no block is referenced
        or being written to.
        """
        fetched, sources = Fetched(), self._offers.usable(sources)
        goals = self._offers.goals(prefix, sources, is_here=is_here)
        if not goals:
            return fetched
        num_saved = goals[0].num_saved
        if num_saved is None:
            num_saved = self._offers.num_more(prefix, sources, is_here=is_here)
        transports = {self._transport_to(source) for source in sources}
        timeout_s = self._worth.patience_s(transports, num_saved, self._timeout_s)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                for goal in goals:
                    await self._fetch_goal(goal, sources, deadline_s, fetched, is_here=is_here)
                    if len(self._pool.match_prefix(goal.hashes)) == len(goal.hashes):
                        break
        except TimeoutError:
            self.statistics.timed_out += 1
            log.info("a prefix was not fetched within %.3f s", timeout_s)
        return fetched

    async def _fetch_goal(
        self,
        goal: Prefix,
        sources: Sequence[PrefixSource],
        deadline_s: float,
        fetched: Fetched,
        *,
        is_here: bool,
    ) -> None:
        """Fetch it, and note the snapshot at its end, if it has one and all of that has come."""
        try:
            await self._fetch_once(goal, sources, deadline_s, fetched, is_here=is_here)
        finally:
            if goal.num_state and self._pool.snapshots is not None:
                num_tokens = self._layout.tokens_in(goal.num_of_tokens)
                self._pool.snapshots.found(goal.hashes[goal.num_of_tokens - 1], num_tokens)

    async def _fetch_once(
        self,
        prefix: Prefix,
        sources: Sequence[PrefixSource],
        deadline_s: float,
        fetched: Fetched,
        *,
        is_here: bool,
    ) -> None:
        """As `_fetch`, but only one of the requests that miss the same block fetches at a time.

        The others wait until it has tried every source. If it stops earlier, because it was
        cancelled or timed out, the next request fetches.
        """
        num_here = len(self._pool.match_prefix(prefix.hashes))
        while num_here < len(prefix.hashes):
            missing = prefix.hashes[num_here]
            others = self._fetching.get(missing)
            if others is None:
                attempt = self._fetching[missing] = _Attempt()
                try:
                    await self._fetch(prefix, sources, deadline_s, fetched, is_here=is_here)
                    attempt.was_complete = True
                finally:
                    del self._fetching[missing]
                    attempt.over.set()
                return
            await others.over.wait()
            before, num_here = num_here, len(self._pool.match_prefix(prefix.hashes))
            if num_here == before and others.was_complete:
                return  # the other request could not fetch it

    async def _fetch(
        self,
        prefix: Prefix,
        sources: Sequence[PrefixSource],
        deadline_s: float,
        fetched: Fetched,
        *,
        is_here: bool,
    ) -> None:
        """Extend the cached prefix from the tier, from one source after the other, from the store.

        All its blocks are referenced meanwhile; released at the end, they are evicted last.
        """
        num_here = len(self._pool.match_prefix(prefix.hashes))
        block_ids = self._headroom.take_prefix(prefix.hashes)
        try:
            if len(block_ids) < num_here:
                self.statistics.crowded += 1
                return
            if self._parts.tier is not None:
                try:
                    async with self._turn(prefix, block_ids, sources, deadline_s):
                        await self._fetch_from_tier(prefix, block_ids, self._parts.tier, fetched)
                except TimeoutError:
                    log.info("the host tier is too slow for a prefix")
            await self._fetch_from_nodes(prefix, block_ids, sources, deadline_s, fetched)
            if self._parts.store is not None and not is_here:
                await self._fetch_from_store(prefix, block_ids, self._parts.store, fetched)
        finally:
            self._pool.release(block_ids)

    # ---- the host tier -------------------------------------------------------------------------

    async def _fetch_from_tier(
        self, prefix: Prefix, block_ids: list[int], tier: NodeTier, fetched: Fetched
    ) -> None:
        num_here = len(block_ids)
        num_blocks = self._room(prefix, tier.match(prefix.hashes[num_here:]))
        hashes = prefix.hashes[: num_here + num_blocks]
        missing = {h for h in hashes[num_here:] if h not in self._pool}
        if not missing or not self._pays(TIER, len(missing), prefix.num_saved):
            return
        started_s = self._parts.clock.now()
        try:
            with self._filling.begun(len(missing)):
                await tier.load(hashes, block_ids, self._headroom)
        finally:
            num_loaded = sum(h in missing for h in hashes[num_here : len(block_ids)])
            self._worth.learn(TIER, num_loaded, len(missing), started_s)
            of_tokens = hashes[num_here : min(len(block_ids), prefix.num_of_tokens)]
            num_loaded = sum(h in missing for h in of_tokens)
            fetched.from_tier += self._layout.tokens_in(num_loaded)
            self.statistics.tier_tokens += self._layout.tokens_in(num_loaded)

    async def _fetch_from_store(
        self, prefix: Prefix, block_ids: list[int], store: NodeStore, fetched: Fetched
    ) -> None:
        # The pool may have the next blocks, as with nodes.
        block_ids += self._headroom.take_prefix(prefix.hashes[len(block_ids) :])
        num_here = len(block_ids)
        num_blocks = self._room(prefix, len(prefix.hashes) - num_here)
        with self._filling.begun(num_blocks):
            await store.load(prefix.hashes, num_blocks, block_ids, self._headroom, prefix.num_saved)
        num_tokens = self._layout.tokens_in(prefix.of_tokens(num_here, len(block_ids)))
        fetched.from_store += num_tokens
        self.statistics.store_tokens += num_tokens

    # ---- other nodes ---------------------------------------------------------------------------

    async def _fetch_from_nodes(
        self,
        prefix: Prefix,
        block_ids: list[int],
        sources: Sequence[PrefixSource],
        deadline_s: float,
        fetched: Fetched,
    ) -> None:
        has_failed = False
        for number, source in enumerate(sources):
            # The pool may have the next blocks: a gap in front of them has just been filled.
            block_ids += self._headroom.take_prefix(prefix.hashes[len(block_ids) :])
            if not self._is_wanted(prefix, block_ids, source):
                continue
            num_here = len(block_ids)
            self.statistics.replanned += has_failed
            try:
                async with self._turn(prefix, block_ids, sources[number + 1 :], deadline_s):
                    num_new = await self._sources.extend(source, prefix, block_ids)
                num_tokens = self._layout.tokens_in(prefix.of_tokens(num_here, len(block_ids)))
                fetched.from_nodes += num_tokens
                self.statistics.tokens += num_tokens
                self.statistics.bytes += num_new * self._layout.block_bytes
            except OutOfBlocks as error:
                self.statistics.crowded += 1
                log.debug("no prefix from %s: %s", source.node.node_id, error)
            except (PdserveError, TimeoutError) as error:
                has_failed = True
                self.statistics.failed += 1
                log.info("no prefix from %s: %s", source.node.node_id, str(error) or "too slow")

    def _is_wanted(self, prefix: Prefix, block_ids: list[int], source: PrefixSource) -> bool:
        """Whether this source has more blocks, there is room for them, and pulling is faster."""
        num_new = prefix.num_offered(source, self._layout.block_size) - len(block_ids)
        if num_new <= 0:
            return False
        if self._room(prefix, num_new) == 0:
            self.statistics.crowded += 1
            return False
        return self._pays(self._transport_to(source), num_new, prefix.num_saved)

    def _transport_to(self, source: PrefixSource) -> str:
        """The transport by which is pulled from it; empty: not known yet."""
        session = self._parts.sessions.opened(source.node)
        return session.link.transport if session is not None else ""

    def _room(self, prefix: Prefix, num_blocks: int) -> int:
        """How many of these blocks may be filled; with a state all, or none."""
        num_free = self._filling.room(num_blocks)
        return 0 if prefix.num_state and num_free < num_blocks else num_free

    def _pays(self, transport: str, num_blocks: int, num_saved: int | None = None) -> bool:
        pays = self._worth.pays(transport, num_blocks, num_saved)
        self.statistics.declined += not pays
        return pays

    def _turn(
        self,
        prefix: Prefix,
        block_ids: Sequence[int],
        others: Sequence[PrefixSource],
        deadline_s: float,
    ) -> asyncio.Timeout:
        """A timeout that divides the remaining time among this source and useful later ones.

        The last source has no deadline except that of the whole fetch.
        """
        size, num_here = self._layout.block_size, len(block_ids)
        num_others = sum(prefix.num_offered(other, size) > num_here for other in others)
        if num_others == 0:
            return asyncio.timeout(None)
        now_s = asyncio.get_running_loop().time()
        return asyncio.timeout_at(now_s + (deadline_s - now_s) / (num_others + 1))
