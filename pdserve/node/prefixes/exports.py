"""Answers other nodes' queries for prefix blocks, and holds the blocks until they are pulled.

    query ──► held, ticketed, answered ──► settled | session ended | lease expired ──► released
                └─ after loading more of them from the host tier, if it has them

Blocks are found by hash, so a query may begin anywhere in a prompt. Three limits bound what is
held: queries per session, distinct blocks over all sessions, and the blocks that requests here may
need. A fourth one is the size of a ticket. Beyond these limits a query gets fewer blocks, or none,
and its node computes the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from kv_transfer.exporter import Exporter
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.node.prefixes.headroom import Headroom
from pdserve.node.prefixes.host_tier import NodeTier
from pdserve.protocol import PrefixAnswer, PrefixQuery
from pdserve.protocol.requests import HASH_BYTES
from pdserve.settings.timeouts import NodeTimeouts
from pdserve.shared.errors import MalformedMessage

log = logging.getLogger(__name__)

MAX_HASHES = 1 << 14  # per query
MAX_QUERIES = 64  # per session at a time
MAX_SHARE = 0.25  # of the pool's blocks, for all sessions together


@dataclass(slots=True)
class PrefixExportStatistics:
    """Counters."""

    queries: int = 0
    blocks: int = 0  # ticketed
    curbed: int = 0  # queries given fewer blocks than there were, mostly because of the limits
    expired: int = 0  # holds that were not settled in time


@dataclass(slots=True)
class _Hold:
    """The blocks of one query."""

    block_ids: list[int]
    lease: asyncio.TimerHandle | None = None
    loading: asyncio.Task[None] | None = None


class PrefixExports:
    """The prefix blocks that a node holds for all sessions."""

    def __init__(
        self,
        pool: BlockPool,
        exporter: Exporter,
        tier: NodeTier | None,
        headroom: Headroom,
        timeouts: NodeTimeouts,
    ) -> None:
        self.exporter = exporter
        self.tier = tier
        self.lease_s = timeouts.hold_s
        self.statistics = PrefixExportStatistics()
        self._pool = pool
        self._headroom = headroom
        self._max_held = int(pool.num_blocks * MAX_SHARE)
        self._num_holds: Counter[int] = Counter()  # block id |-> number of holds it is in (> 0)
        self._num_loading = 0  # blocks that are being loaded, to be held
        self._loads: set[asyncio.Task[None]] = set()

    @property
    def num_held_blocks(self) -> int:
        """Blocks that are held for others, or being loaded for them."""
        return len(self._num_holds) + self._num_loading

    def open(self, send: Callable[[msgspec.Struct], None]) -> PrefixHolds:
        """Begin a session, whose answers go to `send`."""
        return PrefixHolds(self, send)

    async def close(self) -> None:
        """Wait until all loads have ended. All sessions must be closed."""
        await asyncio.gather(*self._loads, return_exceptions=True)

    def num_available(self, hashes: Sequence[bytes]) -> int:
        """How many blocks, from the first on, are in the pool or in the tier."""
        if self.tier is not None:
            return self.tier.match(hashes)
        return len(self._pool.match_whole(hashes))

    def take(self, hashes: Sequence[bytes]) -> list[int]:
        """Hold blocks, from the first on, that the pool has, as far as the limits allow."""
        num_left = self._max_held - self.num_held_blocks
        num_taken = 0
        for block_id in self._headroom.match_prefix(hashes):
            num_left -= block_id not in self._num_holds
            if num_left < 0:
                break
            num_taken += 1
        block_ids = self._pool.take_prefix(hashes[:num_taken])
        self._num_holds.update(block_ids)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Release the blocks of a hold."""
        self._num_holds -= Counter(block_ids)  # drops zeros
        self._pool.release(block_ids)

    def load(
        self, tier: NodeTier, hashes: Sequence[bytes], block_ids: list[int]
    ) -> asyncio.Task[None] | None:
        """Append blocks from the tier to `block_ids`, which hold the first of these hashes.

        They may be written to until the task is done. None: no further block may be held.
        """
        num_here = len(block_ids)
        num_room = min(self._max_held - self.num_held_blocks, self._headroom.num_spare)
        num_new = min(len(hashes) - num_here, num_room)
        if num_new <= 0:
            return None
        loading = tier.load(hashes[: num_here + num_new], block_ids, self._headroom)
        task = asyncio.create_task(loading)
        self._num_loading += num_new
        self._loads.add(task)
        task.add_done_callback(partial(self._loaded, block_ids, num_here, num_new))
        return task

    def _loaded(
        self, block_ids: list[int], num_before: int, num_promised: int, task: asyncio.Task[None]
    ) -> None:
        self._loads.discard(task)
        self._num_loading -= num_promised
        self._num_holds.update(block_ids[num_before:])


class PrefixHolds:
    """The blocks that one session holds, until `close`."""

    def __init__(self, exports: PrefixExports, send: Callable[[msgspec.Struct], None]) -> None:
        self._exports = exports
        self._send = send
        self._holds: dict[str, _Hold] = {}  # by query id

    def __contains__(self, query_id: str) -> bool:
        return query_id in self._holds

    def answer(self, query: PrefixQuery) -> None:
        """Hold the blocks that there are, and answer; after a load from the tier, if need be.

        Raises:
            MalformedMessage: the query is invalid.
        """
        self._check(query)
        exports = self._exports
        exports.statistics.queries += 1
        if len(self._holds) >= MAX_QUERIES:
            exports.statistics.curbed += 1
            self._send(PrefixAnswer(query_id=query.query_id))
            return
        num_available = exports.num_available(query.hashes)
        hashes = query.hashes[: min(num_available, exports.exporter.max_ticket_blocks)]
        hold = self._holds[query.query_id] = _Hold(exports.take(hashes))
        if exports.tier is not None and len(hold.block_ids) < len(hashes):
            hold.loading = exports.load(exports.tier, hashes, hold.block_ids)
        if hold.loading is not None:
            hold.loading.add_done_callback(partial(self._loaded, query, hold, num_available))
        else:
            self._reply(query, hold, num_available)

    def settle(self, query_id: str) -> None:
        """Release the blocks of a query: the puller does not need them any more."""
        hold = self._holds.pop(query_id)
        if hold.lease is not None:
            hold.lease.cancel()
        if hold.loading is not None:
            hold.loading.cancel()  # `_loaded` releases the blocks, once nothing writes to them
        else:
            self._exports.release(hold.block_ids)

    def close(self) -> None:
        """End the session: release all its blocks."""
        for query_id in list(self._holds):
            self.settle(query_id)

    def _loaded(
        self, query: PrefixQuery, hold: _Hold, num_available: int, loading: asyncio.Task[None]
    ) -> None:
        """Answer with what was loaded, even after a failure, unless it was settled meanwhile."""
        hold.loading = None
        if not loading.cancelled() and (error := loading.exception()) is not None:
            log.error("loading from the host tier failed", exc_info=error)
        if self._holds.get(query.query_id) is hold:
            self._reply(query, hold, num_available)
        else:
            self._exports.release(hold.block_ids)

    def _reply(self, query: PrefixQuery, hold: _Hold, num_available: int) -> None:
        num_blocks = len(hold.block_ids)
        self._exports.statistics.curbed += num_blocks < num_available
        if num_blocks == 0:
            self._send(PrefixAnswer(query_id=query.query_id))
            self.settle(query.query_id)
            return
        exporter = self._exports.exporter
        first_token = exporter.layout.tokens_in(query.first_block)
        num_tokens = exporter.layout.tokens_in(num_blocks)
        ticket = exporter.issue(query.query_id, first_token, num_tokens, hold.block_ids)
        self._exports.statistics.blocks += num_blocks
        lease_s = self._exports.lease_s
        loop = asyncio.get_running_loop()
        hold.lease = loop.call_later(lease_s, self._expire, query.query_id)
        self._send(PrefixAnswer(query_id=query.query_id, num_blocks=num_blocks, ticket=ticket))

    def _expire(self, query_id: str) -> None:
        log.warning("the blocks of query %s were not pulled in time", query_id)
        self._exports.statistics.expired += 1
        self.settle(query_id)

    def _check(self, query: PrefixQuery) -> None:
        if not 0 < len(query.hashes) <= MAX_HASHES or query.first_block < 0:
            raise MalformedMessage(
                f"a query for {len(query.hashes)} blocks from block {query.first_block} on: "
                f"1 to {MAX_HASHES} from a block of the prompt are possible"
            )
        if any(len(block_hash) != HASH_BYTES for block_hash in query.hashes):
            raise MalformedMessage("a query with something that is no block hash")
        if query.query_id in self._holds:
            raise MalformedMessage(f"query {query.query_id!r} has been asked before")
