"""Snapshots of states: where a request of a model with states can go on behind a cached prefix.

A state is of all tokens before it. So a prefix is as long as its last snapshot, however much KV
there is behind that. A snapshot is a copy of the state's blocks, at a border of blocks of tokens:
blocks of the same pool, in its prefix cache under hashes of their own, which follow from that of
the last block of tokens. So they are evicted, moved and kept in the host tier as others are.

All of them are of one size, and have at most a share of the pool. The one that goes first then is
worth least: each is worth the tokens that it saves, and more than any that went before it was last
used (GreedyDual).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pdserve.protocol.requests import state_hashes

if TYPE_CHECKING:
    from pdserve.engine.kv.block_pool import BlockPool

SHARE: Final = 4  # at most one of this many blocks is of a snapshot


class Snapshots:
    """Those in one pool's prefix cache."""

    def __init__(self, pool: BlockPool) -> None:
        self.num_used = 0  # times that a request went on behind one
        self._pool = pool
        self._most = pool.num_blocks // SHARE // pool.state_blocks
        self._rank: dict[bytes, int] = {}  # by hash of the last block of tokens; least goes first
        self._tokens: dict[bytes, int] = {}  # that each saves
        self._of: dict[bytes, bytes] = {}  # hash of a snapshot's block |-> the same
        self._lowest = 0  # rank of what went last
        pool.observe(self)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._rank

    def __len__(self) -> int:
        return len(self._rank)

    @property
    def is_possible(self) -> bool:
        """Whether the pool is large enough for any."""
        return self._most > 0

    def length(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks of tokens, all in the pool, a snapshot is behind."""
        numbers = range(len(hashes), 0, -1)
        return next((number for number in numbers if hashes[number - 1] in self._rank), 0)

    def hashes_of(self, block_hash: bytes) -> list[bytes]:
        """Hashes of the blocks of the snapshot there, whether there is one or not."""
        return state_hashes(block_hash, self._pool.state_blocks)

    def blocks(self, block_hash: bytes) -> list[int]:
        """Blocks of the snapshot behind this block of tokens; none: there is none here."""
        return self._pool.match_prefix(self.hashes_of(block_hash)) if block_hash in self else []

    def take(self, block_hash: bytes) -> list[int]:
        """The same, with a reference to each: somebody goes on behind it."""
        if block_hash not in self:
            return []
        self.num_used += 1
        self._rank[block_hash] = self._lowest + self._tokens[block_hash]
        return self._pool.take_prefix(self.hashes_of(block_hash))

    def publish(
        self,
        block_ids: Sequence[int],
        block_hash: bytes,
        num_tokens: int,
        owner: str | None = None,
    ) -> None:
        """Add a snapshot, whose blocks are referenced, of so many tokens, unless it is known.

        `owner` as in `BlockPool.publish`.
        """
        if block_hash in self or not self.is_possible:
            return
        while len(self._rank) >= self._most:
            self.drop(min(self._rank, key=self._rank.__getitem__))
        hashes = self.hashes_of(block_hash)
        for block_id, state_hash in zip(block_ids, hashes, strict=True):
            self._pool.publish(block_id, state_hash, owner)
        self._of.update(dict.fromkeys(hashes, block_hash))
        self._rank[block_hash] = self._lowest + num_tokens
        self._tokens[block_hash] = num_tokens
        self._pool.cache_version += 1

    def found(self, block_hash: bytes, num_tokens: int) -> None:
        """Note one whose blocks have come into the pool from elsewhere, if all of them have."""
        blocks = self._pool.take_prefix(self.hashes_of(block_hash))
        if len(blocks) == self._pool.state_blocks:
            self.publish(blocks, block_hash, num_tokens)
        self._pool.release(blocks)

    def drop(self, block_hash: bytes) -> None:
        """Take one out of the prefix cache."""
        self._lowest = max(self._lowest, self._rank[block_hash])
        self._forget(block_hash)

    # ---- CacheObserver -------------------------------------------------------------------------

    def stored(self, block_hash: bytes) -> None:
        """As CacheObserver.stored. `publish` has done it."""

    def freed(self, block_hash: bytes) -> None:
        """As CacheObserver.freed."""

    def evicted(self, block_hash: bytes) -> None:
        """As CacheObserver.evicted: without all of its blocks, or what it is behind, it is none."""
        of_tokens = block_hash if block_hash in self._rank else self._of.get(block_hash)
        if of_tokens is not None:
            self._forget(of_tokens, but=block_hash)

    def _forget(self, block_hash: bytes, but: bytes = b"") -> None:
        del self._rank[block_hash], self._tokens[block_hash]
        hashes = self.hashes_of(block_hash)
        for state_hash in hashes:
            del self._of[state_hash]
        for state_hash in hashes:
            if state_hash != but:
                self._pool.forget(state_hash)
