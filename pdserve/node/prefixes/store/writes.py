"""Writes to the prefix store: what the host tier holds, in the background.

Nobody waits for them. A block leaves the queue when it leaves the tier, so a store that is slower
than its node misses blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kv_transfer.lone_thread import LoneThread
from kv_transfer.store.blobs import Blobs
from kv_transfer.store.entry import HEADER_BYTES, Key, seal
from kv_transfer.store.erasure import mark_of
from kv_transfer.tier import HostTier
from pdserve.node.prefixes.store.index import StoreIndex
from pdserve.node.prefixes.store.reads import Entry
from pdserve.node.prefixes.store.statistics import StoreStatistics
from pdserve.shared.errors import CorruptTransfer

log = logging.getLogger(__name__)

BATCH: Final = 8  # blocks that are written, and so in memory once more, at a time


@dataclass(slots=True)
class Written:
    """What became of a batch."""

    keys: list[Key] = field(default_factory=list)
    erased: dict[str, float | None] = field(default_factory=dict)  # owner |-> its new mark
    fault: OSError | None = None  # why it ended early


class StoreWrites:
    """Implements TierObserver. Belongs to the event loop."""

    def __init__(
        self,
        blobs: Blobs,
        tier: HostTier,
        index: StoreIndex,
        pays: Callable[[], bool],
        statistics: StoreStatistics,
    ) -> None:
        """`pays`: whether blocks would be read again sooner than computed."""
        self._blobs = blobs
        self._tier = tier
        self._index = index
        self._pays = pays
        self._statistics = statistics
        self._thread = LoneThread("kv-store-writes")
        self._queue: dict[bytes, None] = {}  # oldest first
        self._wake = asyncio.Event()
        self._may_write = asyncio.Event()
        self._allowance = 0  # bytes that may be written before the next survey
        self._fault = ""
        self._wants_survey: Callable[[], None] = lambda: None
        tier.observe(self)

    def on_want(self, listener: Callable[[], None]) -> None:
        """Call `listener` when nothing is written before the next survey."""
        self._wants_survey = listener

    def allow(self, num_bytes: int) -> None:
        """Write up to so much, until this is called again: the store has been surveyed."""
        self._allowance = num_bytes
        self._may_write.set()

    def stored(self, block_hash: bytes) -> None:
        """As TierObserver.stored."""
        if block_hash not in self._index and self._index.own_key(block_hash) is not None:
            self._queue[block_hash] = None
            self._wake.set()

    def evicted(self, block_hash: bytes) -> None:
        """As TierObserver.evicted."""
        if block_hash in self._queue:
            del self._queue[block_hash]
            self._statistics.missed += 1

    async def run(self) -> None:
        """Write, until cancelled."""
        while True:
            self._wake.clear()
            if not self._queue:
                await self._wake.wait()
                continue
            await self._may_write.wait()
            keys = self._next()
            if self._pays():
                await self._write(keys)
            else:
                self._statistics.declined += len(keys)

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._thread.close()

    def _next(self) -> list[Key]:
        """The next blocks; without those whose owner has been erased since."""
        hashes = [block_hash for _, block_hash in zip(range(BATCH), self._queue, strict=False)]
        for block_hash in hashes:
            del self._queue[block_hash]
        return [key for h in hashes if (key := self._index.own_key(h)) is not None]

    async def _write(self, keys: Sequence[Key]) -> None:
        entries = [(key, entry) for key in keys if (entry := await self._entry(key)) is not None]
        marks = {key.owner: self._index.marks.get(key.owner) for key, _ in entries}
        # Without a deadline: nobody waits for this task but `close`, which cancels it.
        written = await self._thread.start(lambda: write(self._blobs, entries, marks))
        for key in written.keys:
            self._index.add(key)
        for owner, mark_s in written.erased.items():
            self._index.erased(owner, mark_s)
        num_bytes = sum(len(entry) for _, entry in entries)
        self._statistics.written += len(written.keys)
        self._statistics.bytes += num_bytes
        self._allowance -= num_bytes
        self._note(written.fault)
        if written.fault is not None or self._allowance <= 0:
            self._may_write.clear()
            self._wants_survey()

    async def _entry(self, key: Key) -> Entry | None:
        entry = np.empty(HEADER_BYTES + self._tier.block_bytes, dtype=np.uint8)
        try:
            is_there = await self._tier.take(key.block_hash, entry[HEADER_BYTES:])
        except CorruptTransfer as error:
            log.warning("a block of the host tier is not put into the store: %s", error)
            return None
        return entry if is_there else None

    def _note(self, error: OSError | None) -> None:
        fault = "" if error is None else str(error)
        self._statistics.failed += bool(fault)
        if fault and fault != self._fault:
            log.warning("prefixes are not written to the store for now: %s", fault)
        self._fault = fault


def write(
    blobs: Blobs, entries: Sequence[tuple[Key, Entry]], marks: dict[str, float | None]
) -> Written:
    """Write entries, without those of owners that have been erased since they had these marks.

    Blocks, in a thread.
    """
    done = Written()
    try:
        done.erased = _changed(blobs, marks)
        for key, entry in entries:
            if key.owner not in done.erased:
                seal(key, entry)
                blobs.write(key.name, entry)
                done.keys.append(key)
        done.erased |= _changed(blobs, marks)
        for key in done.keys:
            if key.owner in done.erased:  # meanwhile
                blobs.remove(key.name)
        done.keys = [key for key in done.keys if key.owner not in done.erased]
    except OSError as error:
        done.fault = error
    return done


def _changed(blobs: Blobs, marks: dict[str, float | None]) -> dict[str, float | None]:
    found = {owner: mark_of(blobs, owner) for owner in marks}
    return {owner: mark_s for owner, mark_s in found.items() if mark_s != marks[owner]}
