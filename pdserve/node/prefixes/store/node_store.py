"""The prefix store as a node sees it: what of a prompt it has, and how that gets into the pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np

from kv_transfer.lone_thread import LoneThread
from kv_transfer.store.blobs import Blobs
from kv_transfer.store.entry import HEADER_BYTES, Key
from kv_transfer.store.eviction import stamp_of_use
from kv_transfer.store.objects import blobs_at
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.node.prefixes.cost import PrefixWorth
from pdserve.node.prefixes.headroom import Headroom
from pdserve.node.prefixes.host_tier import NodeTier
from pdserve.node.prefixes.store.index import StoreIndex
from pdserve.node.prefixes.store.reads import LOSS, Breaker, Entry, Patience, StoreReads
from pdserve.node.prefixes.store.statistics import StoreStatistics
from pdserve.node.prefixes.store.upkeep import Limits, survey, use_all
from pdserve.node.prefixes.store.writes import StoreWrites
from pdserve.settings.prefixes import PrefixConfig
from pdserve.settings.values import parse_bytes
from pdserve.shared.errors import CorruptTransfer

log = logging.getLogger(__name__)

STORE: Final = "store"  # its name among the transports in `PullCosts`
GROUP: Final = 16  # blocks that go from the tier into the pool at a time
SURVEY_S: Final = 30.0  # between surveys, ...
SURVEY_SHARE: Final = 50  # ... which take one of so many seconds at most
UNSURVEYED: Final = 64  # a node writes one of so many bytes of a store between surveys
PROBES: Final = (1, 8)  # blocks that are read to see how fast the store is


class NodeStore:
    """A node's prefix store, below its tier. Belongs to the event loop."""

    def __init__(
        self,
        blobs: Blobs,
        tier: NodeTier,
        pool: BlockPool,
        kind: str,
        worth: PrefixWorth,
        limits: Limits,
    ) -> None:
        """`kind`: fingerprint of the KV."""
        self.statistics = StoreStatistics()
        self.num_bytes = 0  # of all that is in it, as last seen
        self._blobs = blobs
        self._tier = tier
        self._worth = worth
        self._limits = limits
        self.index = StoreIndex(kind, 2 * (pool.num_blocks + tier.tier.num_blocks))
        pool.on_owned(self.index.own)
        self.breaker = Breaker()
        self._reads = StoreReads(blobs, tier.tier.block_bytes)
        self._writes = StoreWrites(
            blobs,
            tier.tier,
            self.index,
            lambda: worth.is_cheaper(STORE, GROUP),
            self.statistics,
        )
        self._wants_survey = asyncio.Event()
        self._writes.on_want(self._wants_survey.set)
        self._upkeep = LoneThread("kv-store-upkeep")
        self._tasks: list[asyncio.Task[None]] = []
        self._used: set[bytes] = set()  # since the last survey

    def start(self) -> None:
        """Begin to look after it."""
        work = (self._writes.run(), self._survey_often(), self._probe_when_due())
        self._tasks = [asyncio.create_task(one) for one in work]

    async def close(self) -> None:
        """Stop. Nothing may be loading."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writes.close()
        self._reads.close()
        self._upkeep.close()

    # ---- up ------------------------------------------------------------------------------------

    def num_first(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, can be read now."""
        if self.breaker.is_open or self._reads.is_stuck:
            return 0
        return self.index.num_first(hashes)

    async def load(
        self,
        hashes: Sequence[bytes],
        num_blocks: int,
        block_ids: list[int],
        headroom: Headroom,
        num_saved: int | None = None,
    ) -> int:
        """Append up to so many blocks of a prompt to `block_ids`, which hold its first ones.

        Returns how many came. Stops where waiting would be a loss. `hashes`: of the whole prompt.
        `num_saved`: as `Prefix.num_saved`.
        """
        num_here = len(block_ids)
        num_wanted = min(num_blocks, self.num_first(hashes[num_here:]))
        most = len(hashes) - num_here if num_saved is None else num_saved
        slack_s = self._worth.share_s(LOSS, most)
        if num_wanted == 0 or not self._pays(num_wanted, slack_s, num_saved):
            return 0
        keys = [self.index.key(h) for h in hashes[num_here : num_here + num_wanted]]

        def compute_s(num_read: int) -> float:
            return self._worth.share_s(1.0, min(num_read, most))

        patience = Patience(asyncio.get_running_loop().time(), slack_s, compute_s)
        arrivals = Arrivals(self._tier, hashes, block_ids, headroom)
        started_s = self._worth.now_s()
        try:
            await self._read(keys, patience, arrivals)
            await arrivals.load()
        finally:
            num_new = len(block_ids) - num_here
            self._worth.learn(STORE, num_new, num_wanted, started_s)
        self._note_use(hashes, num_here, num_new)
        return num_new

    def _pays(self, num_blocks: int, slack_s: float, num_saved: int | None) -> bool:
        """Whether it is faster to read, and the first block is there before patience ends."""
        if self._worth.fetch_s(STORE, 1) > slack_s:
            self._worth.declined(STORE)
            return False
        return self._worth.pays(STORE, num_blocks, num_saved)

    async def _read(self, keys: Sequence[Key], patience: Patience, arrivals: Arrivals) -> None:
        """Read into the tier, whatever goes wrong."""
        statistics = self.statistics
        try:
            if not await self._reads.read_in_turn(keys, patience, arrivals.take):
                statistics.missing += 1
                self.index.remove(keys[arrivals.num_taken].block_hash)
        except TimeoutError:
            statistics.slow += 1
            self.breaker.failed()
            log.info("the prefix store is too slow for a prompt")
        except CorruptTransfer as error:
            log.warning("%s; it is computed instead", error)
            self._drop(keys[arrivals.num_taken], is_corrupt=True)
        except OSError as error:
            statistics.failed += 1
            self.breaker.failed()
            log.warning("the prefix store cannot be read: %s", error)

    def _drop(self, key: Key, *, is_corrupt: bool) -> None:
        if key.block_hash not in self.index:
            return  # another that read it has dropped it
        self.statistics.corrupt += is_corrupt
        self.index.remove(key.block_hash)
        self._upkeep.start(lambda: self._blobs.remove(key.name))

    def _note_use(self, hashes: Sequence[bytes], first: int, number: int) -> None:
        """Count what was read as used, in the store, once between two surveys."""
        self.statistics.read += number
        self.statistics.bytes += number * self._tier.tier.block_bytes
        now_s = time.time()
        stamps = {
            self.index.key(h).name: stamp_of_use(now_s, self.index.reach_s, index)
            for index, h in enumerate(hashes[: first + number])
            if h in self.index and h not in self._used
        }
        self._used.update(hashes[: first + number])
        if stamps:
            self._upkeep.start(partial(use_all, self._blobs, stamps))

    # ---- upkeep --------------------------------------------------------------------------------

    async def _survey_often(self) -> None:
        while True:
            started_s = time.monotonic()
            self._wants_survey.clear()
            try:
                await self._survey()
            except OSError as error:
                self.statistics.failed += 1
                log.warning("the prefix store cannot be looked through: %s", error)
            took_s = time.monotonic() - started_s
            await asyncio.sleep(min(SURVEY_S, SURVEY_SHARE * took_s))
            with suppress(TimeoutError):
                async with asyncio.timeout(SURVEY_S):
                    await self._wants_survey.wait()

    async def _survey(self) -> None:
        self.index.survey_begins()
        kind, limits = self.index.kind, self._limits
        found = await self._upkeep.start(lambda: survey(self._blobs, kind, limits))
        self.index.surveyed(found.keys, found.marks, found.reach_s)
        self._used.clear()
        self.num_bytes = found.num_bytes
        self.statistics.evicted += found.num_evicted
        self._writes.allow(found.most_bytes // UNSURVEYED)
        if self.index.some(1) and not self._worth.knows(STORE):
            self.breaker.probe.set()

    async def _probe_when_due(self) -> None:
        """Read what nobody waits for: once at first, and while the way is closed."""
        while True:
            await self.breaker.probe.wait()
            self.breaker.probe.clear()
            await self.breaker.probed(well=await self._probe())

    async def _probe(self) -> bool:
        """Learn what reading takes; returns whether it worked."""
        for number in PROBES:
            started_s = self._worth.now_s()
            keys = [self.index.key(h) for h in self.index.some(number)]
            reads = (self._reads.read(key) for key in keys)
            found = await asyncio.gather(*reads, return_exceptions=True)
            for key, entry in zip(keys, found, strict=True):
                if isinstance(entry, OSError):
                    log.info("the prefix store does not answer: %s", entry)
                    return False
                if not isinstance(entry, np.ndarray):
                    self._drop(key, is_corrupt=isinstance(entry, CorruptTransfer))
            if num_read := sum(isinstance(entry, np.ndarray) for entry in found):
                self._worth.learn(STORE, num_read, num_read, started_s)
        return True


class Arrivals:
    """Takes what is read, in order, and brings it into tier and pool, a group at a time."""

    def __init__(
        self, tier: NodeTier, hashes: Sequence[bytes], block_ids: list[int], headroom: Headroom
    ) -> None:
        """As `NodeStore.load`."""
        self.num_taken = 0
        self._tier = tier
        self._hashes = hashes
        self._block_ids = block_ids
        self._headroom = headroom
        self._first = len(block_ids)
        self._group = min(GROUP, max(1, tier.tier.num_blocks // 2))

    async def take(self, entry: Entry) -> bool:
        """Take the next block; returns whether there is room for more."""
        block_hash = self._hashes[self._first + self.num_taken]
        if not await self._tier.tier.put(block_hash, entry[HEADER_BYTES:]):
            return False
        self.num_taken += 1
        return self.num_taken % self._group != 0 or await self.load()

    async def load(self) -> bool:
        """Load into the pool what has been taken; returns whether there was room."""
        end = self._first + self.num_taken
        await self._tier.load(self._hashes[:end], self._block_ids, self._headroom)
        return len(self._block_ids) >= end


def make_store(
    config: PrefixConfig, tier: NodeTier | None, pool: BlockPool, kind: str, worth: PrefixWorth
) -> NodeStore | None:
    """A node's store, not started yet; None if there is none, or no tier above it."""
    if not config.kv_store or tier is None:
        return None
    limits = Limits(parse_bytes(config.kv_store_size), parse_bytes(config.kv_store_quota))
    return NodeStore(blobs_at(config.kv_store), tier, pool, kind, worth, limits)
