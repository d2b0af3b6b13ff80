"""KV block ownership: reference counts, the prefix cache and its LRU eviction.

    allocate ──► referenced (count >= 1) ──release──► free, uncached ──► allocate
                      │  publish(hash)                      ▲
                      └──release──► free, cached ──evict────┘
                                        └──take_prefix──► referenced

A block's *generation* is bumped when its last reference is dropped, which invalidates every ticket
that names the block. The bump happens before the block can be allocated to anyone for writing. The
content of a cached block stays readable until the block is evicted, which happens only when no
uncached block is left.

A block may *lack* the KV of layers with windows, if it was pulled for a stream that is beyond them.
A prefix that ends in the windows' reach of such a block is none, and observers do not hear of it.

Where windows give blocks back (`pdserve/kv/companions.py`), a block that is allocated, named and
counted is the first of several. Its companions have references of their own, which an owner drops
when its windows have passed the block. If nobody has one left, but the prefix cache has the block,
they stay until they are evicted; else they are free. Then the block lacks them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from pdserve.engine.kv.cache_observer import CacheObserver
from pdserve.engine.kv.snapshots import Snapshots
from pdserve.engine.kv.window_blocks import WindowBlocks
from pdserve.kv import need
from pdserve.kv.companions import Companions
from pdserve.shared.errors import OutOfBlocks


def _ignore(*_: object) -> None:
    """Default of what is called: nobody exports the pool, or listens."""


class BlockPool:
    """Blocks 0..num_blocks-1 of one pool. Not thread-safe: the event loop owns it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        bump_generations: Callable[[Sequence[int]], None] = _ignore,
        windows: Sequence[int] = (),
        companions: Companions | None = None,
        state_blocks: int = 0,
    ) -> None:
        """A pool of free blocks.

        Args:
            num_blocks: companions included.
            block_size: in tokens.
            prefix_cache: whether content is found again.
            bump_generations: voids tickets.
            windows: in tokens, of layers that have one.
            companions: of each block, kept up to date here; None: blocks have none.
            state_blocks: that each request has besides those of its tokens.
        """
        self._width = 1 if companions is None else 1 + companions.shape[1]
        self.num_blocks = num_blocks // self._width  # with companions
        self.block_size = block_size
        self.state_blocks = state_blocks
        self._prefix_cache = prefix_cache
        self._bump_generations = bump_generations
        self._references = [0] * num_blocks
        self._uncached = list(range(num_blocks - 1, -1, -1))  # a stack: reuse warm memory first
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and cached, in LRU order
        self._block_of: dict[bytes, int] = {}  # hash |-> block id
        self._hash_of: dict[int, bytes] = {}  # block id |-> hash
        self._windows = (min(windows), max(windows)) if windows else None
        self._lacking: set[int] = set()
        self.companions = companions
        self._companions = None if companions is None else WindowBlocks(companions)
        self._release_listeners: list[Callable[[], None]] = []
        # High-water mark: exactly the first `_num_used` blocks have ever been allocated, because
        # used blocks are on top of the stack.
        self._num_used = 0
        self._tell_used: Callable[[int], None] = _ignore
        self._tell_owner: Callable[[bytes, str], None] = _ignore
        self._observers: list[CacheObserver] = []
        self.cache_version = 0  # incremented whenever the prefix cache changes
        # What makes a prefix one, if requests have states.
        self.snapshots = Snapshots(self) if prefix_cache and state_blocks else None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return need.blocks_for(num_tokens, self.block_size)

    def full_blocks(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return need.full_blocks(num_tokens, self.block_size)

    def tokens_in(self, num_blocks: int) -> int:
        """Tokens for which so many blocks have room."""
        return need.tokens_in(num_blocks, self.block_size)

    def on_release(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever blocks have become free."""
        self._release_listeners.append(listener)

    def on_first_use(self, listener: Callable[[int], None]) -> None:
        """Call `listener` with the number of blocks ever used, whenever that number grows."""
        self._tell_used = listener

    def on_owned(self, listener: Callable[[bytes, str], None]) -> None:
        """Call `listener` with the hash of each block that is published, and whose it is."""
        self._tell_owner = listener

    def observe(self, observer: CacheObserver) -> None:
        """Notify `observer` of every change to the prefix cache from now on."""
        self._observers.append(observer)

    @property
    def hashes(self) -> Iterable[bytes]:
        """Hashes of all blocks in the prefix cache that lack nothing, referenced ones included."""
        if not self._lacking:
            return self._block_of.keys()
        return [h for h, block_id in self._block_of.items() if block_id not in self._lacking]

    def __contains__(self, block_hash: bytes) -> bool:
        block_id = self._block_of.get(block_hash)
        return block_id is not None and block_id not in self._lacking

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, including evictable cached ones."""
        if self._companions is None:
            return len(self._uncached) + len(self._cached)
        return self._num_free_single // self._width

    @property
    def num_within_reach(self) -> int:
        """The same, with those for which there is memory (`SharedPool`)."""
        return self.num_free

    @property
    def num_in_all(self) -> int:
        """Those that requests use, and those within reach."""
        return self.num_blocks

    @property
    def num_cached(self) -> int:
        """Number of free blocks that hold a reusable prefix."""
        if self._companions is None:
            return len(self._cached)
        return (self._num_free_single - len(self._uncached)) // self._width

    @property
    def _num_free_single(self) -> int:
        """Free blocks, companions or not."""
        spare = 0 if self._companions is None else self._companions.num_spare
        num_whole = len(self._cached) if self._companions is None else self._companions.num_whole
        return len(self._uncached) + num_whole + spare

    def allocate(self, num_blocks: int, num_bare: int = 0) -> list[int]:
        """Allocate blocks with one reference each and undefined content.

        The first `num_bare` have no companions: the windows of their owner have passed them.

        Raises:
            OutOfBlocks: fewer blocks are free; none was allocated.
        """
        num_left = self.num_free_after_taking((), num_blocks, num_bare)
        if num_left < 0 and num_left + self.want(-num_left) < 0:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_free} are free")
        taken = [self._take_free() for _ in range(num_blocks)]
        for block_id in taken:
            self._references[block_id] = 1
        if self._companions is not None:
            for block_id in taken[num_bare:]:
                self._companions.give(block_id, [self._take_free() for _ in range(self._width - 1)])
            self._companions.none_for(taken[:num_bare])
            self._lacking.update(taken[:num_bare])
        num_used = len(self._references) - len(self._uncached)
        if num_used > self._num_used:
            self._num_used = num_used
            self._tell_used(num_used)
        return taken

    def want(self, num_blocks: int) -> int:
        """Get so many further free blocks, or ask for them; returns how many there are now."""
        del num_blocks
        return 0  # all have their memory

    def retain(self, block_ids: Sequence[int], num_bare: int = 0) -> None:
        """Add a reference to each of these referenced blocks, so they outlive their owner.

        To companions as well, of those that have some, but for the first `num_bare` blocks.
        """
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is free"
            self._references[block_id] += 1
        if self._companions is not None:
            self._retain_companions(block_ids[num_bare:])

    def release(self, block_ids: Sequence[int], num_bare: int = 0) -> None:
        """Drop one reference of each block; free the blocks that have none left.

        Of companions as well, but for the first `num_bare` blocks: their owner has none of these.

        Blocks are freed in reverse order, so that the last ones are evicted first: the later blocks
        of a hash chain are useless without the earlier ones.
        """
        freed = []
        for block_id in reversed(block_ids):
            assert self._references[block_id] > 0, f"block {block_id} is freed twice"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                freed.append(block_id)
        is_passed = self._companions is not None and self._drop_companions(block_ids[num_bare:])
        if not freed and not is_passed:
            return
        if freed:
            self._bump_generations(freed)
        for block_id in freed:
            block_hash = self._hash_of.get(block_id)
            if block_hash is None:
                self._lacking.discard(block_id)
                self._uncached.append(block_id)
                continue
            self._cached[block_id] = None
            if self._companions is not None:
                self._cached.move_to_end(block_id)  # it is there already if its companions were
                self._companions.num_whole += 1
            if block_id not in self._lacking:
                for observer in self._observers:
                    observer.freed(block_hash)
        for listener in self._release_listeners:
            listener()

    def pass_windows(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of the companions of each block: an owner's windows have passed it."""
        if self._companions is not None and self._drop_companions(block_ids):
            for listener in self._release_listeners:
                listener()

    def num_passed(self, num_tokens: int) -> int:
        """Return how many leading blocks no window reaches any more behind so many tokens.

        What follows them may end in a border of blocks that is before the end. 0 where windows
        give nothing back.
        """
        if self._companions is None or self._windows is None:
            return 0
        return need.window_block(num_tokens, self._windows[1], self.block_size)

    def publish(self, block_id: int, block_hash: bytes, owner: str | None = None) -> None:
        """Add a full, referenced block to the prefix cache, unless its hash is there already.

        It takes the place of one that lacks something, if it lacks nothing itself. `owner` is that
        of its prompt, if it is known.
        """
        assert self._references[block_id] > 0, f"block {block_id} is free"
        if not self._prefix_cache or block_id in self._hash_of:
            return
        if owner is not None:
            self._tell_owner(block_hash, owner)
        if (other := self._block_of.get(block_hash)) is not None:
            if other not in self._lacking or block_id in self._lacking:
                return
            self._forget(other)
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        self.cache_version += 1
        if block_id in self._lacking:
            return
        for observer in self._observers:
            observer.stored(block_hash)

    def lack_windows(
        self, block_table: Sequence[int], first: int, num_tokens: int, *, is_aligned: bool = True
    ) -> None:
        """Note which unpublished blocks of a stream lack KV of layers with windows.

        Args:
            block_table: of the stream.
            first: the first of its blocks that was pulled.
            num_tokens: that have KV.
            is_aligned: they came from blocks of this size; else blocks there may have lacked what
                is still in the reach of the last border here.
        """
        if self._windows is not None:
            window = self._windows[0]
            end = need.window_block(num_tokens, window, self.block_size)
            if not is_aligned:
                end = self.blocks_for(max(0, num_tokens - window + 1))
            self._lacking.update(block_table[first:end])

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the longest prefix of this hash chain. Adds no reference.

        Whoever goes on behind it sees no KV that one of them lacks.
        """
        matched = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return matched if self._lacking.isdisjoint(matched) else self._usable(matched)

    def usable(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Of this chain, as much as a request can go on behind; all of it, but for states."""
        if self.snapshots is None:
            return hashes
        return hashes[: self.snapshots.length(hashes[: len(self.match_prefix(hashes))])]

    def forget(self, block_hash: bytes) -> None:
        """Take a block out of the prefix cache, if it is there."""
        block_id = self._block_of.get(block_hash)
        if block_id is None:
            return
        self._forget(block_id)
        self.cache_version += 1
        for observer in self._observers:
            observer.evicted(block_hash)

    def match_whole(self, hashes: Sequence[bytes]) -> list[int]:
        """As match_prefix, up to the first block that lacks anything: for others to go on with."""
        return [self._block_of[block_hash] for block_hash in takewhile(self.__contains__, hashes)]

    def take_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of `match_prefix` with a reference added to each."""
        matched = self.match_prefix(hashes)
        for block_id in matched:
            if self._references[block_id] == 0:
                self._take_cached(block_id)
            self._references[block_id] += 1
        if self._companions is not None:
            self._retain_companions(matched)
        return matched

    def num_free_after_taking(
        self, matched: Sequence[int], num_new: int = 0, num_bare: int = 0
    ) -> int:
        """Return how many blocks would stay free if these matched blocks were taken.

        And if `num_new` others were allocated, of which the first `num_bare` without companions.
        Negative: there are too few.
        """
        num_taken = sum(1 for block_id in matched if self._references[block_id] == 0)
        if self._companions is None:
            return self.num_free - num_taken - num_new
        num_spare = sum(map(self._companions.are_spare, matched))
        num_taken += num_new + (num_spare + num_new - num_bare) * (self._width - 1)
        return (self._num_free_single - num_taken) // self._width

    def num_sole(self, block_ids: Sequence[int]) -> int:
        """Return how many blocks `release(block_ids)` would free; ids may occur several times."""
        counts = Counter(block_ids)
        sole = [block_id for block_id, n in counts.items() if self._references[block_id] == n]
        if self._companions is None:
            return len(sole)
        num_held = sum(map(self._companions.are_held, sole))
        return (len(sole) + num_held * (self._width - 1)) // self._width

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state and that the two cache maps agree."""
        uncached = set(self._uncached)
        cached = {b for b in self._cached if self._references[b] == 0}
        referenced = {b for b, count in enumerate(self._references) if count > 0}
        companions: set[int] = set()
        if self._companions is not None:
            companions = self._companions.check([*referenced, *cached], self._cached)
            assert self._companions.num_whole == len(cached)
            bare = {b for b in (*referenced, *cached) if not self._companions.are_there(b)}
            assert bare <= self._lacking, "a block without companions lacks nothing"
        else:
            assert len(cached) == len(self._cached), "a cached block is referenced"
        assert len(uncached) == len(self._uncached), "a block is on the free list twice"
        assert not uncached & self._lacking, "a block without content lacks something"
        states = [uncached, cached, referenced, companions, self._without_memory()]
        num_all = len(self._references)
        assert sum(map(len, states)) == num_all, "a block is in two states, or in none"
        assert set().union(*states) == set(range(num_all)), "a block was lost"
        assert min(self._references, default=0) >= 0
        assert {h: b for b, h in self._hash_of.items()} == self._block_of
        assert cached <= set(self._hash_of), "a cached block has no hash"
        assert not uncached & set(self._hash_of), "an uncached block has a hash"

    def _without_memory(self) -> set[int]:
        return set()

    def _take_free(self) -> int:
        if self._uncached:
            return self._uncached.pop()
        block_id, _ = self._cached.popitem(last=False)
        if self._companions is not None:
            self._uncached += self._companions.evict(block_id)
            if self._references[block_id] > 0:
                self._lack(block_id)
                return self._uncached.pop()
            self._companions.num_whole -= 1
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        self.cache_version += 1
        if block_id in self._lacking:
            self._lacking.discard(block_id)
            return block_id
        for observer in self._observers:
            observer.evicted(block_hash)
        return block_id

    def _forget(self, block_id: int) -> None:
        """Take a block out of the prefix cache."""
        del self._block_of[self._hash_of.pop(block_id)]
        if self._references[block_id] == 0:
            self._take_cached(block_id)
            self._lacking.discard(block_id)
            self._uncached.append(block_id)

    def _take_cached(self, block_id: int) -> None:
        """Take an unreferenced block, but not its companions, from those that may be evicted."""
        if self._companions is None:
            del self._cached[block_id]
            return
        self._companions.num_whole -= 1
        if not self._companions.are_spare(block_id):
            del self._cached[block_id]

    def _retain_companions(self, block_ids: Sequence[int]) -> None:
        assert self._companions is not None
        for block_id in block_ids:
            if self._companions.retain(block_id):
                del self._cached[block_id]

    def _drop_companions(self, block_ids: Sequence[int]) -> bool:
        """Drop a reference of each one's companions; whether some are free now."""
        assert self._companions is not None
        dropped = [b for b in block_ids if self._companions.drop(b)]
        for block_id in reversed(dropped):
            self._bump_generations(self._companions.of(block_id))
            if block_id in self._hash_of and block_id not in self._lacking:
                self._companions.num_spare += self._width - 1
                self._cached[block_id] = None
            else:
                self._uncached += self._companions.take(block_id)
                self._lacking.add(block_id)
        return len(dropped) > 0

    def _lack(self, block_id: int) -> None:
        """Note that a block of the prefix cache has lost its companions."""
        self._lacking.add(block_id)
        self.cache_version += 1
        for observer in self._observers:
            observer.evicted(self._hash_of[block_id])

    def _usable(self, matched: list[int]) -> list[int]:
        """The longest prefix of these blocks of which the windows behind it see everything."""
        assert self._windows is not None, "else no block lacks anything"
        end = len(matched)
        while end > 0:
            first = need.window_block(self.tokens_in(end) + 1, self._windows[1], self.block_size)
            lacking = [i for i in range(first, end) if matched[i] in self._lacking]
            if not lacking:
                break
            end = lacking[-1]
        return matched[:end]
