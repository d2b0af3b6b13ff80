"""The host tier: a second, larger cache of prefix blocks, under the same hashes as in the pool.

    free ──store──► writing ──copied──► held (in an LRU) ──evicted──► writing | free
                       └──failed, cancelled──► free

A slot's generation is incremented before it is written. So a load works like a pull: plan the
spans, copy them, then check the generations. Nothing is locked while bytes are copied; a load whose
slot was reused meanwhile fails with StaleTicket. A file's copies add up the sums of what they store
(checksum.py), and compare what they load. The tier has threads of its own, because a page of
the file may have to be read from disk.

A pool in CPU memory has its tier in a file, one on GPUs in pinned memory (`cuda/pinned.py`). A slot
has a place in each part of the pool, and all are copied at the same time, each by the host that has
the part.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_transfer.hosts.far_host import FarHost
from kv_transfer.memory import ExportedPool, check_generations
from kv_transfer.spans.plan import Spans
from kv_transfer.threads import CancelFlag, CopyThreads, together
from pdserve import _native
from pdserve.kv.companions import Companions
from pdserve.shared.errors import CorruptTransfer, StaleTicket
from pdserve.shared.process.may_pass import config_error

NUM_THREADS = 2  # for each part of the pool: what is stored and what is loaded do not wait


class FileBlocks:
    """Blocks in an unnamed file, which disappears with the process: a region for each part.

    Raises:
        ConfigError: the file cannot be created; says where, and how large.
        NotNow: there is no room.
    """

    def __init__(self, num_blocks: int, block_sizes: Sequence[int], directory: str) -> None:
        """`block_sizes` are bytes of a block in each part of the pool."""
        self.num_blocks = num_blocks
        size = num_blocks * sum(block_sizes)
        where = directory or tempfile.gettempdir()
        try:
            with tempfile.TemporaryFile(dir=where, prefix="pdserve-tier-") as file:
                # Allocates the file: touching a hole on a full disk would kill the process.
                os.posix_fallocate(file.fileno(), 0, size)
                mapping = mmap.mmap(file.fileno(), size)
        except (OSError, ValueError) as error:
            raise config_error(
                f"tier_dir {where!r}: a file of {size} bytes cannot be made there: {error}", error
            ) from error
        ends = np.cumsum([num_blocks * block_bytes for block_bytes in block_sizes])
        flat: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.regions = np.split(flat, ends[:-1])


class TierCopies(Protocol):
    """Copies between a part of the pool and the tier. Called in threads; stop when cancelled.

    Once one has returned or raised, nothing of it is copied any more.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, in the pool and in the tier."""
        ...

    def store(self, spans: Spans, cancel: CancelFlag) -> None:
        """Copy (pool offset, tier offset, bytes) spans, each a block."""
        ...

    def load(self, spans: Spans, cancel: CancelFlag) -> None:
        """Copy (tier offset, pool offset, bytes) spans, each a block.

        Raises:
            CorruptTransfer: the tier has other bytes than were stored.
        """
        ...

    def take(self, spans: Spans, into: NDArray[np.uint8], cancel: CancelFlag) -> None:
        """Copy (tier offset, offset in `into`, bytes) spans. Raises as `load`."""
        ...

    def put(self, spans: Spans, source: NDArray[np.uint8], cancel: CancelFlag) -> None:
        """Copy (offset in `source`, tier offset, bytes) spans, each a block."""
        ...

    def close(self) -> None:
        """Release what copies take; none may be in progress."""
        ...


class CpuCopies:
    """Copies between a CPU pool, or a part of one, and a file, which is not trusted."""

    def __init__(self, pool: ExportedPool, blocks: FileBlocks, part: int = 0) -> None:
        self.block_bytes = pool.block_bytes
        self._pool = pool.flat
        self._tier = blocks.regions[part]
        self._sums = np.zeros(blocks.num_blocks, dtype=np.uint64)  # of what each slot holds

    def store(self, spans: Spans, cancel: CancelFlag) -> None:
        """Copy (pool offset, tier offset, bytes) spans."""
        self.put(spans, self._pool, cancel)

    def load(self, spans: Spans, cancel: CancelFlag) -> None:
        """Copy (tier offset, pool offset, bytes) spans."""
        self.take(spans, self._pool, cancel)

    def put(self, spans: Spans, source: NDArray[np.uint8], cancel: CancelFlag) -> None:
        """As TierCopies.put."""
        self._sums[spans[:, 1] // self.block_bytes] = _copy(self._tier, source, spans, cancel)

    def take(self, spans: Spans, into: NDArray[np.uint8], cancel: CancelFlag) -> None:
        """As TierCopies.take."""
        found = _copy(into, self._tier, spans, cancel)
        slots = spans[:, 0] // self.block_bytes
        wrong = slots[found != self._sums[slots]]
        if len(wrong) and not cancel.byte[0]:
            raise CorruptTransfer(
                f"the host tier does not hold in slot {wrong[0]} what it was given"
            )

    def close(self) -> None:
        """Nothing to do."""


def _copy(
    to: NDArray[np.uint8], source: NDArray[np.uint8], spans: Spans, cancel: CancelFlag
) -> NDArray[np.uint64]:
    """Copy the spans, and return the sum of each."""
    places = np.zeros((len(spans), 2), dtype=np.int64)
    places[:, 1] = np.arange(len(spans))
    sums = np.zeros(len(spans), dtype=np.uint64)
    _native.copy_summed(to, source, spans, places, sums, cancel.byte)
    return sums


class TierObserver(Protocol):
    """Is notified of changes of the tier's content."""

    def stored(self, block_hash: bytes) -> None:
        """The tier holds this block now."""
        ...

    def evicted(self, block_hash: bytes) -> None:
        """The tier does not hold this block any more."""
        ...


@dataclass(slots=True)
class TierStatistics:
    """Counters of blocks, and of bytes in both directions."""

    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    stale: int = 0  # loads of blocks that were evicted in the meantime
    corrupt: int = 0  # loads of other bytes than were stored
    bytes: int = 0


# A part, and byte offsets of its blocks: in the tier, and in what they are copied from or to.
_PartCopy: TypeAlias = Callable[
    [TierCopies, NDArray[np.int64], NDArray[np.int64]], Callable[[CancelFlag], None]
]


class SlotCopies:
    """Copies between blocks and slots, in all parts of the pool that are on this host."""

    def __init__(self, parts: Sequence[TierCopies]) -> None:
        """`parts`: the copies of each, which this owns."""
        self.block_bytes = sum(part.block_bytes for part in parts)
        self._parts = tuple(parts)
        self._threads = CopyThreads(NUM_THREADS * len(parts), "kv-tier")

    async def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks to slots.

        Once this has returned or raised, also by cancellation, nothing of it is copied any more.
        """
        stores = [(part.store, part.block_bytes) for part in self._parts]
        await self._copy(stores, block_ids, slots)

    async def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots to blocks; ends as `store`."""
        loads = [(part.load, part.block_bytes) for part in self._parts]
        await self._copy(loads, slots, block_ids)

    async def take(self, slots: Sequence[int], into: NDArray[np.uint8]) -> None:
        """Copy slots to `into`, part by part; ends as `store`."""
        await self._each_part(
            slots, lambda part, here, there: partial(part.take, _spans(here, there, part), into)
        )

    async def put(self, source: NDArray[np.uint8], slots: Sequence[int]) -> None:
        """Copy to slots what `take` copies from them; ends as `store`."""
        await self._each_part(
            slots, lambda part, here, there: partial(part.put, _spans(there, here, part), source)
        )

    def close(self) -> None:
        """End the threads. Nothing may be being stored or loaded.

        Everything is closed, even if one part fails.
        """
        with ExitStack() as closing:
            for part in self._parts:
                closing.callback(part.close)
            self._threads.close()

    async def _copy(
        self,
        parts: Sequence[tuple[Callable[[Spans, CancelFlag], None], int]],
        from_ids: Sequence[int],
        to_ids: Sequence[int],
    ) -> None:
        """Copy whole blocks of all parts: (how, bytes of a block)."""
        source, destination = (np.array(ids, dtype=np.int64) for ids in (from_ids, to_ids))
        copies = []
        for copy, block_bytes in parts:
            spans = _native.block_spans(source, destination, block_bytes, 0, block_bytes, False)
            cancel = CancelFlag()
            copies.append(self._threads.run(partial(copy, spans, cancel), cancel))
        await together(copies)

    async def _each_part(self, slots: Sequence[int], copy: _PartCopy) -> None:
        """Copy between slots and bytes elsewhere, in which one part follows the other."""
        copies, begin = [], 0
        for part in self._parts:
            here = np.array(slots, dtype=np.int64) * part.block_bytes
            there = begin + np.arange(len(slots), dtype=np.int64) * part.block_bytes
            begin += len(slots) * part.block_bytes
            cancel = CancelFlag()
            copies.append(self._threads.run(partial(copy(part, here, there), cancel), cancel))
        await together(copies)


def _spans(source: NDArray[np.int64], to: NDArray[np.int64], part: TierCopies) -> Spans:
    return np.column_stack([source, to, np.full(len(to), part.block_bytes, np.int64)])


class HostTier:
    """Maps hashes to slots 0..num_blocks-1. All methods belong to the event loop's thread."""

    def __init__(
        self,
        num_blocks: int,
        parts: Sequence[TierCopies],
        hosts: Sequence[FarHost] = (),
        companions: Companions | None = None,
    ) -> None:
        """A tier that holds nothing.

        Args:
            num_blocks: for which there is memory, companions included.
            parts: the copies of each part here, which this owns.
            hosts: that have the other parts.
            companions: of the pool's blocks, at any time. What is stored and loaded has them.
        """
        self._companions = companions
        self._width = 1 if companions is None else 1 + companions.shape[1]
        self.num_blocks = num_blocks = num_blocks // self._width
        self.statistics = TierStatistics()
        self._here = SlotCopies(parts)
        self._copies: tuple[SlotCopies | FarHost, ...] = (self._here, *hosts)
        self.block_bytes = self._width * sum(copies.block_bytes for copies in self._copies)
        self._generations = np.zeros(num_blocks, dtype=np.uint64)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # held, least recently used first
        self._writing: set[bytes] = set()
        self._observers: list[TierObserver] = []

    def observe(self, observer: TierObserver) -> None:
        """Notify `observer` of every change from now on."""
        self._observers.append(observer)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slot_of

    @property
    def hashes(self) -> list[bytes]:
        """The hashes of all blocks held."""
        return list(self._slot_of)

    @property
    def num_held(self) -> int:
        """Number of blocks held."""
        return len(self._slot_of)

    async def store(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Store copies of these pool blocks, which the caller must not change meanwhile.

        Blocks that are held already just count as used. Once this has returned or raised, also by
        cancellation, nothing reads the pool blocks any more.
        """
        chosen: list[tuple[bytes, int, int]] = []  # hash, pool block, slot
        for block_hash, block_id in zip(hashes, block_ids, strict=True):
            if block_hash in self._slot_of:
                self._slot_of.move_to_end(block_hash)
            elif block_hash not in self._writing:
                slot = self._take_slot()
                if slot is None:
                    break
                self._writing.add(block_hash)
                chosen.append((block_hash, block_id, slot))
        if not chosen:
            return
        ids = [block_id for _, block_id, _ in chosen]
        with self._written({block_hash: slot for block_hash, _, slot in chosen}) as slots:
            blocks, places = self._all_blocks(ids), self._all_slots(slots)
            await together([copies.store(blocks, places) for copies in self._copies])
        self.statistics.stored += len(chosen)
        self.statistics.bytes += len(chosen) * self.block_bytes

    async def put(self, block_hash: bytes, block: NDArray[np.uint8]) -> bool:
        """Hold a block that comes from elsewhere, as `take` has copied it; False: no slot is free.

        The tier has all parts of the pool. Nothing reads `block` any more once this has ended.
        """
        if block_hash in self._slot_of or block_hash in self._writing:
            return True
        if (slot := self._take_slot()) is None:
            return False
        self._writing.add(block_hash)
        with self._written({block_hash: slot}) as slots:
            await self._here.put(block, self._all_slots(slots))
        return True

    async def take(self, block_hash: bytes, into: NDArray[np.uint8]) -> bool:
        """Copy a block to `into`, uint8[block_bytes]; False: it is not held, or not any more.

        Nothing writes to `into` any more once this has ended.

        Raises:
            CorruptTransfer: the tier has lost what it was given; it forgets it.
        """
        if (slot := self._slot_of.get(block_hash)) is None:
            return False
        expected = self._generations[slot]
        try:
            await self._here.take(self._all_slots([slot]), into)
        except CorruptTransfer:
            if self._generations[slot] != expected:
                return False
            self.statistics.corrupt += 1
            self._forget(block_hash)
            raise
        return bool(self._generations[slot] == expected)

    @contextmanager
    def _written(self, slots: dict[bytes, int]) -> Iterator[list[int]]:
        """Hold what is copied to these slots, by hash, within the context, unless it raises."""
        is_complete = False
        try:
            yield list(slots.values())
            is_complete = True
        finally:
            self._writing.difference_update(slots)
            if not is_complete:
                self._free += slots.values()
        for block_hash, slot in slots.items():
            self._slot_of[block_hash] = slot
            for observer in self._observers:
                observer.stored(block_hash)

    async def load(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Copy held blocks into these blocks of the pool.

        Once this has returned or raised, also by cancellation, nothing writes to the pool blocks
        any more.

        Raises:
            StaleTicket: one was evicted meanwhile; the content of the pool blocks is undefined.
            CorruptTransfer: likewise, as the tier has lost what it was given; it forgets them all.
            KeyError: one was not held to begin with.
        """
        slots = [self._slot_of[block_hash] for block_hash in hashes]
        for block_hash in reversed(hashes):  # later blocks of a chain are evicted first
            self._slot_of.move_to_end(block_hash)
        ids = np.array(slots, dtype=np.int64)
        expected = self._generations[ids]
        blocks, places = self._all_blocks(block_ids), self._all_slots(slots)
        try:
            await together([copies.load(places, blocks) for copies in self._copies])
        except CorruptTransfer:
            self._check(ids, expected)  # rather than bytes of another block
            self.statistics.corrupt += 1
            for block_hash in hashes:
                self._forget(block_hash)
            raise
        self._check(ids, expected)
        self.statistics.loaded += len(slots)
        self.statistics.bytes += len(slots) * self.block_bytes

    def close(self) -> None:
        """End what copies. Nothing may be being stored or loaded."""
        self._here.close()

    def _check(self, ids: NDArray[np.int64], expected: NDArray[np.uint64]) -> None:
        try:
            check_generations(self._generations, ids, expected)
        except StaleTicket:
            self.statistics.stale += 1
            raise

    def _forget(self, block_hash: bytes) -> None:
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)
            for observer in self._observers:
                observer.evicted(block_hash)

    def _all_blocks(self, block_ids: Sequence[int]) -> Sequence[int]:
        """These blocks of the pool, each followed by its companions."""
        if self._companions is None:
            return block_ids
        ids = np.array(block_ids, dtype=np.int64)
        found: list[int] = np.column_stack([ids, self._companions[ids]]).ravel().tolist()
        assert min(found, default=0) >= 0, "what is copied has its companions"
        return found

    def _all_slots(self, slots: Sequence[int]) -> Sequence[int]:
        """Where a slot's block and companions are."""
        if self._width == 1:
            return slots
        return [slot * self._width + n for slot in slots for n in range(self._width)]

    def _take_slot(self) -> int | None:
        """A slot to write to, evicting its content if need be; None: all are being written."""
        if self._free:
            slot = self._free.pop()
        elif self._slot_of:
            block_hash, slot = self._slot_of.popitem(last=False)
            self.statistics.evicted += 1
            for observer in self._observers:
                observer.evicted(block_hash)
        else:
            return None
        _native.bump_generations(self._generations, np.array([slot], dtype=np.int64))
        return slot
