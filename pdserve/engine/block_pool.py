"""Who owns which KV block: reference counts, the prefix cache and its LRU eviction.

    allocate ──► referenced (count >= 1) ──release──► free, uncached ──► allocate
                      │  publish(hash)                      ▲
                      └──release──► free, cached ──evict────┘
                                        └──take_prefix──► referenced

A block's *generation* is bumped when its last reference goes: every ticket that names it is void
from then on, and the bump comes before anybody can be given the block to write. Content of a cached
block stays readable until it is evicted, which happens only when no uncached block is left.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pdserve.errors import OutOfBlocks


def _ignore(_: Sequence[int]) -> None:
    """For pools that nobody exports."""


def _nobody_asks(_: int) -> None:
    """How many blocks have been used."""


class CacheObserver(Protocol):
    """Whoever follows what is cached. Called in mid-verb: it takes notes and moves no blocks."""

    def stored(self, block_hash: bytes) -> None:
        """A block was published under this hash."""
        ...

    def evicted(self, block_hash: bytes) -> None:
        """Its block will be overwritten."""
        ...

    def freed(self, block_hash: bytes) -> None:
        """Its block has lost its last reference: still cached, and in line to be evicted."""
        ...


class BlockPool:
    """Blocks 0..num_blocks-1 of one pool. Not thread-safe: the event loop owns it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        bump_generations: Callable[[Sequence[int]], None] = _ignore,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._bump_generations = bump_generations
        self._references = [0] * num_blocks
        self._uncached = list(range(num_blocks - 1, -1, -1))  # a stack: recently used stay warm
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and cached, oldest first
        self._block_of: dict[bytes, int] = {}  # hash |-> block id
        self._hash_of: dict[int, bytes] = {}  # block id |-> hash
        self._release_listeners: list[Callable[[], None]] = []
        self._num_used = 0  # ever; the first so many, since those used before come first
        self._tell_used: Callable[[int], None] = _nobody_asks
        self._observers: list[CacheObserver] = []
        self.cache_version = 0  # another one whenever the prefix cache has changed

    def on_release(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever blocks have become free."""
        self._release_listeners.append(listener)

    def on_first_use(self, listener: Callable[[int], None]) -> None:
        """Tell `listener` how many blocks have ever been used, whenever these become more."""
        self._tell_used = listener

    def observe(self, observer: CacheObserver) -> None:
        """Tell `observer` of every change to the prefix cache from now on."""
        self._observers.append(observer)

    @property
    def hashes(self) -> Iterable[bytes]:
        """Under which blocks are cached now, referenced ones included."""
        return self._block_of.keys()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._block_of

    @property
    def num_free(self) -> int:
        """Blocks that an allocation could take, cached ones included."""
        return len(self._uncached) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that hold a reusable prefix."""
        return len(self._cached)

    def allocate(self, num_blocks: int) -> list[int]:
        """`num_blocks` blocks with one reference each, of undefined content.

        Raises:
            OutOfBlocks: fewer are free; nothing was taken.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_free} are free")
        taken = [self._take_free() for _ in range(num_blocks)]
        for block_id in taken:
            self._references[block_id] = 1
        if self.num_blocks - len(self._uncached) > self._num_used:
            self._num_used = self.num_blocks - len(self._uncached)
            self._tell_used(self._num_used)
        return taken

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each of these referenced blocks: they outlive their present owner."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is free"
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each; those without any left are free, the last ones first in line.

        Freed in reverse, because a chain's later blocks are useless without the earlier ones.
        """
        freed = []
        for block_id in reversed(block_ids):
            assert self._references[block_id] > 0, f"block {block_id} is freed twice"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                freed.append(block_id)
        if not freed:
            return
        self._bump_generations(freed)
        for block_id in freed:
            block_hash = self._hash_of.get(block_id)
            if block_hash is not None:
                self._cached[block_id] = None
                for observer in self._observers:
                    observer.freed(block_hash)
            else:
                self._uncached.append(block_id)
        for listener in self._release_listeners:
            listener()

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Offer a full, referenced block for reuse; a second one of equal content stays private."""
        assert self._references[block_id] > 0, f"block {block_id} is free"
        if not self._prefix_cache or block_hash in self._block_of or block_id in self._hash_of:
            return
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        self.cache_version += 1
        for observer in self._observers:
            observer.stored(block_hash)

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest prefix of this chain. Takes no reference."""
        matched = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def take_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """As `match_prefix`, with a reference to each block."""
        matched = self.match_prefix(hashes)
        for block_id in matched:
            if self._references[block_id] == 0:
                del self._cached[block_id]
            self._references[block_id] += 1
        return matched

    def num_free_after_taking(self, matched: Sequence[int]) -> int:
        """Free blocks that would be left once these matched blocks were taken."""
        return self.num_free - sum(1 for block_id in matched if self._references[block_id] == 0)

    def num_sole(self, block_ids: Sequence[int]) -> int:
        """How many would be free if each of these lost one reference for every time it is named."""
        counts = Counter(block_ids)
        return sum(1 for block_id, n in counts.items() if self._references[block_id] == n)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state, and the cache's two maps agree."""
        uncached, cached = set(self._uncached), set(self._cached)
        referenced = {b for b, count in enumerate(self._references) if count > 0}
        assert len(uncached) == len(self._uncached), "a block is on the free list twice"
        states = [uncached, cached, referenced]
        assert sum(map(len, states)) == self.num_blocks, "a block is in two states, or in none"
        assert set().union(*states) == set(range(self.num_blocks)), "a block was lost"
        assert all(count >= 0 for count in self._references)
        assert {h: b for b, h in self._hash_of.items()} == self._block_of
        assert cached <= set(self._hash_of), "a cached block has no hash"
        assert not uncached & set(self._hash_of), "an uncached block has a hash"

    def _take_free(self) -> int:
        if self._uncached:
            return self._uncached.pop()
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        self.cache_version += 1
        for observer in self._observers:
            observer.evicted(block_hash)
        return block_id
